"""`resumed`: what a result says where another commit, or another machine, went on with what one had begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MACHINE = ("commit", "torch", "processor", "cores", "threads", "gpu")  # what may have changed when a run goes on


def resumed(begun: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The same with this environment at the end of its list `resumed`, if it is another than the last.

    Args:
        begun: what holds the `environment` of the beginning, and those that went on with it so far.
        now: the environment that goes on.
    """
    known = [begun["environment"], *begun.get("resumed", ())]
    if all(now[name] == known[-1][name] for name in MACHINE):
        return {**begun}
    return {**begun, "resumed": [*known[1:], now]}
