"""`apart`: where a result that was made again differs from the first by more than `NOISE` says that it may.

What is computed repeats to rounding, what is trained as far as two seeds agree, what is timed as far as quartiles do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from opnorm.lab.cli import UsageError

Result = dict[str, Any]
Cell = Mapping[str, Any]
ROUNDING = 1e-4  # of an overestimation; the norms that it is relative to are enclosed to a tenth of that
NORMS = 1e-3  # of a norm, relative
SEEDS = 0.03  # of an accuracy, beside the errors of its test images: a choice, and no measurement
ERRORS = 3.0  # standard errors of the difference of two accuracies
RATIOS = 0.02  # between the quartiles of two ratios of times
FILES = {"data_path", "images", "weights"}  # whose names do not matter, since `data` and `sha256` say what is in them

_RUNS = (
    "on the same kind of machine, with as many threads, a run repeats bit by bit. On another one rounding grows during "
    f"training, so that two runs may differ as two seeds would: by {100 * SEEDS:g} percentage points, which is a "
    "choice and was not measured, and three standard errors of the difference of two accuracies, 3·√(2p(1 - p)/n) for "
    "n test images"
)
NOISE = {
    "tightness": (
        f"Noise: computed again, a number of this section may differ by {100 * ROUNDING:g} percentage points, since "
        "the kernels follow from the seed, and what is left is rounding and how closely the norms are enclosed."
    ),
    "pretrained": (
        f"Noise: computed again, an overestimation may differ by {100 * ROUNDING:g} percentage points and a norm by "
        f"{100 * NORMS:g} %, since every iteration starts from its seed, and what is left is rounding."
    ),
    "cifar-grid": (
        f"Noise: {_RUNS}. A run may finish in one and diverge in the other only at the largest rate with which any run "
        "of its K finishes, in either."
    ),
    "imagenet": f"Noise: {_RUNS}. No run may finish in one and diverge in the other.",
    "timing": (
        "Noise: measured again on the same kind of machine, the quartiles of a factor overlap with those shown, or lie "
        f"at most {RATIOS:g} beside them. On another machine it is another number."
    ),
}


class Gap(NamedTuple):
    """By how much two values differ, and by how much they may."""

    what: str
    difference: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether that is noise; a difference that is no number is none."""
        return self.difference <= self.allowed

    @property
    def part(self) -> float:
        """Of what is allowed; of nothing, the difference."""
        return self.difference / self.allowed if self.allowed else self.difference

    def __str__(self) -> str:
        if self.difference == math.inf and not self.allowed:  # a finding, and no number
            return self.what
        return f"{self.what}: {self.difference:.3g} apart, where {self.allowed:.3g} is noise"


def apart(name: str, committed: Result, again: Result) -> list[str]:
    """The cells of an experiment in which its second result differs from the first by more than noise, and how."""
    return [str(gap) for gap in gaps(name, committed, again) if not gap.within]


def gaps(name: str, committed: Result, again: Result) -> list[Gap]:
    """Every pair of values of two results; refused where they are of other profiles, settings or data."""
    first, second = _wanted(committed), _wanted(again)
    if odd := [key for key in first | second if first.get(key) != second.get(key)]:
        raise UsageError(
            f"expected two results of {name} with the same profile, settings and data, got another {' and '.join(odd)}"
        )
    missing = [_only(cell) for cell in committed["cells"].keys() ^ again["cells"].keys()]
    return [*sorted(missing), *GAPS[name](committed, again)]


def _wanted(result: Result) -> dict[str, Any]:
    """What two results have in common if they can be compared."""
    settings = {key: value for key, value in result["settings"].items() if key not in FILES}
    data = {key: value for key, value in result.get("data", {}).items() if key != "notes"}
    return settings | {"profile": result["profile"], "data": data, "sha256": result.get("sha256")}


def _computed(committed: Result, again: Result) -> Iterator[Gap]:
    """|a - b| for every number of a cell; of norms |a/b - 1|."""
    for name, *cells in _common(committed["cells"], again["cells"]):
        first, second = (dict(_numbers(cell)) for cell in cells)
        yield from (_only(f"{name}, {key}") for key in sorted(first.keys() ^ second.keys()))
        for key, a, b in _common(first, second):
            norm = key == "norm"
            difference = 0.0 if a == b else abs(a / b - 1 if norm else a - b)
            yield Gap(f"{name}, {key}", difference, NORMS if norm else ROUNDING)


def _trained(committed: Result, again: Result) -> Iterator[Gap]:
    """|p - q| of accuracies, of which 0.03 + 3·√(2p(1 - p)/n) is noise."""
    edges, images = _edges(committed) | _edges(again), again["data"]["test"]
    for name, first, second in _common(committed["cells"], again["cells"]):
        if first["status"] != second["status"]:
            what = f"{name}: {first['status']} in the one, {second['status']} in the other"
            yield Gap(what, 0.0 if _setting(second) in edges else math.inf, 0.0)
        elif first["status"] == "finished":
            for key in [key for key in ("test_accuracy", "top5_accuracy") if key in first]:
                p = (first[key] + second[key]) / 2
                allowed = SEEDS + ERRORS * math.sqrt(2 * p * (1 - p) / images)
                yield Gap(f"{name}, {key}", abs(first[key] - second[key]), allowed)


def _timed(committed: Result, again: Result) -> Iterator[Gap]:
    """|a - b| of the medians of ratios, of which noise is what leaves their quartiles 0.02 apart or less."""
    for name, first, second in _common(committed["cells"], again["cells"]):
        for way, a, b in _common(first["step"], second["step"]):
            low, high = sorted((a["ratio"], b["ratio"]), key=lambda ratio: float(ratio["median"]))
            between = (high["median"] - high["low"]) + (low["high"] - low["median"])
            yield Gap(f"{name}, {way}", high["median"] - low["median"], between + RATIOS)


def _edges(result: Result) -> set[tuple[float, float]]:
    """For each K the largest learning rate with which a run finishes, where rates are compared."""
    largest: dict[float, float] = {}
    for cell in result["cells"].values():
        if cell["status"] == "finished" and "lr" in cell["cell"]:
            K, rate = _setting(cell)
            largest[K] = max(rate, largest.get(K, 0.0))
    return {*largest.items()}


def _setting(cell: Cell) -> tuple[float, float]:
    return cell["cell"]["K"], cell["cell"].get("lr", math.nan)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """{"over": {"auto": 0.1}} as ("over, auto", 0.1), of whatever depth; what is not finite is text in JSON."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}, {key}" if name else key)
    elif isinstance(value, int | float) or value in ("inf", "-inf", "nan"):
        yield name, float(value)


def _common(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What two mappings have under the names that both know."""
    return ((name, first[name], second[name]) for name in first if name in second)


def _only(what: str) -> Gap:
    """What only one of the two results has, which no noise explains."""
    return Gap(f"{what}: only in one of the two", math.inf, 0.0)


GAPS: dict[str, Callable[[Result, Result], Iterator[Gap]]] = {
    "tightness": _computed,
    "pretrained": _computed,
    "cifar-grid": _trained,
    "imagenet": _trained,
    "timing": _timed,
}
