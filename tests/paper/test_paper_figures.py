"""The vDNN++ paper's times, simulated: Table IV, section V-A, and the direction of Figures 6 and 9."""

from __future__ import annotations

import pytest

from bench.paper_figures import figure_6, relative_improvement, section_v_a, table_iv


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return table_iv()


def test_table_iv_times_within_a_tenth(rows: list[dict[str, object]]) -> None:
    timed = [row for row in rows if isinstance(row["published"], tuple)]
    assert len(timed) == 7
    for row in timed:
        assert (row["vdnn_ms"], row["vdnnpp_ms"]) == pytest.approx(row["published"], rel=0.1), row


def test_table_iv_what_does_not_fit(rows: list[dict[str, object]]) -> None:
    refused = [(row["network"], row["mode"]) for row in rows if not row["fits"]]
    assert refused == [("VGG-191(32)", "aconv(p)")]


def test_table_iv_dyn_is_aconv_for_vgg116_and_conv_for_vgg191(rows: list[dict[str, object]]) -> None:
    times = {(row["network"], row["mode"]): row["vdnn_ms"] for row in rows}
    assert times["VGG-116(32)", "dyn"] == times["VGG-116(32)", "aconv(p)"]
    assert times["VGG-191(32)", "dyn"] == times["VGG-191(32)", "conv(p)"]


def test_section_v_a_relative_improvement() -> None:
    """Published: 57.5 % for the constructed network; with Table I's times at a size that fits the card."""
    found = section_v_a()
    assert found["improvement"] == pytest.approx(57.5, abs=6)


def test_figure_6_a_pools_computation_is_shorter_than_its_transfer_and_a_later_convolutions_longer() -> None:
    layers = {row["layer"]: row for row in figure_6()}
    pool3, conv41 = layers["features.16"], layers["features.17"]
    assert pool3["kind"] == "pool"
    assert pool3["compute_ms"] < pool3["transfer_ms"]
    assert conv41["compute_ms"] > conv41["transfer_ms"]


def test_relative_improvement_is_the_papers() -> None:
    assert relative_improvement(2091, 2491, 2261) == pytest.approx(57.5)
    assert relative_improvement(10, 10, 10) is None
