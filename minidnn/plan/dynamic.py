"""The vDNN family: a fixed offload set, or `dyn`, which yields the vDNN paper's candidates in its order.

dyn tries nothing offloaded with the fastest algorithms, then each offload set with the fastest, then with the fastest
that fit, then with the memory-optimal ones; those that do not fit are dropped, and the fastest of the rest is taken.
"""

from __future__ import annotations

from minidnn.plan.mode import Policy, Proposals, Request
from minidnn.plan.vdnn import offload_plan

SETS = ("all", "conv", "aconv")


def vdnn_family(sync: str) -> Policy:
    """The policy of `vdnn` (sync "both") or `vdnn++` (sync "compute")."""

    def policy(request: Request) -> Proposals:
        mode = request.mode
        assert mode.offload_set is not None
        if mode.offload_set != "dyn":
            yield offload_plan(request, mode.offload_set, sync, mode.rule)
            return
        yield offload_plan(request, "none", sync, "p")
        for rule in ("p", "g", "m"):
            for offload_set in SETS:
                yield offload_plan(request, offload_set, sync, rule)

    return policy
