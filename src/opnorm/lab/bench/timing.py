"""Interleaved timing: every candidate once a round, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.progress import track

# glibc gives large blocks back to the system and faults them in again: training steps then vary by half.
MALLOC = {
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}


def keep_memory(arguments: Sequence[str]) -> None:
    """Start `opnorm` with these arguments again, once, in a process that keeps the memory it has been given."""
    if sys.platform == "linux" and not MALLOC.keys() <= os.environ.keys():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "opnorm", *arguments], os.environ | MALLOC)


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, what: str = ""
) -> dict[str, dict[str, Any]]:
    """Seconds of each candidate, median and quartiles over the rounds, and the ratio to the first one in each round.

    Args:
        candidates: functions without arguments, by name. The first is what the others are compared to.
        rounds: how often each runs, after two rounds that are not counted.
        what: what the progress bar says; without it there is none.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    numbers = range(rounds + 2)
    names = [*candidates]
    for number in track(numbers, description=what, transient=True) if what else numbers:
        turn = number % len(names)  # each comes after each place in the round: what ran before leaves its caches
        for name in names[turn:] + names[:turn]:
            run = candidates[name]
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    first = next(iter(seconds.values()))
    return {name: _summary(values, first) for name, values in seconds.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(seconds: list[float], first: list[float]) -> dict[str, Any]:
    return {
        "seconds": quartiles(seconds),
        "ratio": quartiles([a / b for a, b in zip(seconds, first, strict=True)]),
        "rounds": len(seconds),
    }


def quartiles(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}
