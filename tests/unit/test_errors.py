"""Every error that the library raises on purpose: found in its source, read, and met from outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minidnn import errors
from minidnn.errors import MiniDnnError
from tests.cli.wrong_uses import USES

PACKAGE = Path(errors.__file__).parent

INTERNAL = {
    "PoolError": "the library used its own pool wrongly",
    "ScheduleError": "the checker's verdict on a schedule, for whoever writes a policy",
    "CodecError": "packed data were damaged in memory",
    "GradientMismatch": "two modes computed different gradients",
}
"""Faults that no argument mends: their sentences name what is wrong, and need not say what would work."""

CONSTANT = {
    "argument is missing or two exclude each other": (
        "give either a MODEL", "simulate needs times", "--checkpoint-every needs", "--weights and --resume both",
        "slots: one belongs to another loader", "max_pool2d_backward got neither",
        "batch_norm_backward: relu needs Y",
    ),
    "the argument's value is said in words": (
        "loss is None", "input_shape is None", "update is 'per-layer'", "timelines is empty",
        "precision is 'fp64'", "placement is 'live'", "loss is not CrossEntropyLoss", "layer is this Sequential",
        "net is in another trainer", "net has no layer", "net has no weights", "the data set is empty",
        "dropout: operands must lie",
    ),
    "something is not installed": ("plots need matplotlib",),
    "the object's state is what is wrong": (
        "trainer is closed", "trainer stopped in an iteration", "trainer is in an iteration",
        "the packed part was released", "deadlock:", "an op without an algorithm",
    ),
}  # fmt: skip
"""Why a sentence may be without an interpolated value, and how it begins."""

PASSED_ON = "{}: {}"
"""A layer or file in front of another error's whole sentence."""

NO_ARGUMENT = ("deadlock:",)
"""How sentences begin that no argument mends, though their class has others."""

WORKS = re.compile(
    r"\b(must|expected|needs?|takes?|give|write|use|choose|name|leave|lower|get|make|mend|append|add|resume|open|close|"
    r"replace|free each|profile this|goes with|see|names it)\b"
)
"""Words with which a sentence says what would work."""


@dataclass(frozen=True)
class Site:
    """One `raise`: where it stands, the class, and the message as a template (`{}` where a value comes in)."""

    place: str
    kind: str
    message: ast.expr | None

    @property
    def template(self) -> str | None:
        """The sentence with `{}` for each value; None where it is not written at the site."""
        return None if self.message is None else _template(self.message)


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is None else left + (right or "{}")
    if isinstance(node, ast.IfExp):
        return _template(node.body)
    return None


def all_errors() -> dict[str, type[MiniDnnError]]:
    """The exception tree by name, GradientMismatch of `compare` included."""
    import minidnn.run.compare  # noqa: F401 - defines one

    found, new = {}, [MiniDnnError]
    while new:
        kind = new.pop()
        found[kind.__name__] = kind
        new += kind.__subclasses__()
    return {name: kind for name, kind in found.items() if kind.__module__.startswith("minidnn")}


TREE = all_errors()


def sites() -> Iterator[Site]:
    """Every `raise` of the tree in the library and its models."""
    for path in sorted(PACKAGE.rglob("*.py")):
        raises = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Raise))
        for node in raises:
            call = node.exc
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in TREE:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield Site(place, call.func.id, call.args[0] if call.args else None)


SITES = tuple(sites())


def test_there_are_errors_to_read() -> None:
    assert len(SITES) > 250
    assert {site.kind for site in SITES} == TREE.keys()


def test_a_wrong_use_meets_every_class() -> None:
    """Each of them is executed by tests/cli/test_wrong_uses.py, which also asks for the class."""
    met = {kind: [use.typed for use in USES if use.kind == kind] for kind in TREE}
    assert not [kind for kind, uses in met.items() if not uses]
    assert {use.kind for use in USES} == TREE.keys()


def test_every_sentence_has_a_value_in_it() -> None:
    constant = tuple(text for texts in CONSTANT.values() for text in texts)
    bare = {
        s.place: s.template for s in SITES
        if s.template is not None and "{}" not in s.template and not s.template.startswith(constant)
    }  # fmt: skip
    assert not bare


def test_the_list_of_sentences_without_a_value_is_not_longer_than_it_must_be() -> None:
    said = [s.template for s in SITES if s.template is not None and "{}" not in s.template]
    for texts in CONSTANT.values():
        for text in texts:
            assert any(sentence.startswith(text) for sentence in said), text


def test_every_sentence_says_what_would_work() -> None:
    silent = {
        s.place: s.template for s in SITES
        if s.template is not None and s.kind not in INTERNAL and not WORKS.search(s.template)
        and not s.template.startswith(NO_ARGUMENT) and s.template != PASSED_ON
    }  # fmt: skip
    assert not silent


def test_values_of_any_kind_are_shown_in_one_line() -> None:
    """`{value!r}` may be as long as it likes, and fail: only what is a string already may be written so."""
    strings = ("cli/", "ops/", "plan/", "models/")
    long = [
        site.place for site in SITES
        if site.message is not None and not site.place.startswith(strings)
        and any(isinstance(v, ast.FormattedValue) and v.conversion == ord("r") for v in ast.walk(site.message))
    ]  # fmt: skip
    assert not long


def test_every_message_is_one_sentence() -> None:
    for site in SITES:
        text = site.template or ""
        assert "\n" not in text, site.place
        assert not re.search(r"[.!] [A-Z]|[^.]\.$", text), site.place
        assert not re.match(r"[A-Z][a-z]+ ", text.removeprefix("Linear")), f"{site.place}: no capital where none is"
