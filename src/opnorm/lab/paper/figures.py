"""Figures: pure functions from the JSON of a result to a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, ScalarFormatter

from opnorm.lab.paper import cifar_grid_page, imagenet_page, pretrained_page, timing_page

Result = dict[str, Any]
PAPER, REFERENCE, ALONE, OURS, BEST = "#b3541e", "#d9a066", "#8a8a8a", "#2b6cb0", "#2f855a"
CURVES = {
    "paper to K alone": ("the paper's bound to 30 iterations of K alone", ALONE, ":"),
    "paper to reference": ("the paper's bound to 30 iterations of KᵀK", REFERENCE, "--"),
    "paper": ("the paper's bound to the norm", PAPER, "-"),
    "FourierBound": ("FourierBound to the norm", OURS, "-"),
    "auto": ("auto to the norm", BEST, ":"),
}
FLOOR = 2e-5  # what is less, and above all what is exact, is drawn there
PUBLISHED = {7: 0.17, 128: 0.02}  # the medians that the text of the paper names


def tightness(result: Result) -> Figure:
    """Figure 2: overestimation by resolution, median and quartiles; large for 3×3, small for the other kernels."""
    families: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"].values():
        families.setdefault(cell["family"], []).append(cell)
    first, *others = families
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False)[0]
    axes = left.subplots()
    _curves(axes, families[first], first, CURVES)
    axes.plot([*PUBLISHED], [*PUBLISHED.values()], "k*", markersize=9, label="published medians")
    left.legend(loc="outside lower center", ncols=2, fontsize=7.5, frameon=False)
    axes.set_ylabel("relative overestimation")
    ours = {key: CURVES[key] for key in ("paper", "FourierBound", "auto")}
    for panel, name in zip(right.subplots(2, 2, sharey=True).flat, others, strict=False):
        _curves(panel, families[name], name, ours)
    return figure


def _curves(axes: Axes, cells: list[dict[str, Any]], name: str, curves: Mapping[str, tuple[str, str, str]]) -> None:
    sizes = [cell["N"] for cell in cells]
    for key, (label, colour, style) in curves.items():
        low, median, high = ([max(cell[key][q], FLOOR) for cell in cells] for q in ("low", "median", "high"))
        axes.plot(sizes, median, style, color=colour, label=label, marker=".", markersize=4, clip_on=False)
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="N", xscale="log", yscale="log", ylim=(FLOOR, 1.5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    shown = [n for n in (5, 7, 10, 14, 28, 56, 128) if sizes[0] <= n <= sizes[-1]]
    axes.set_xticks(shown)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.3)


FIGURES: dict[str, Callable[[Result], Figure]] = {
    "tightness": tightness,
    "pretrained": pretrained_page.figure,
    "cifar-grid": cifar_grid_page.figure,
    "imagenet": imagenet_page.figure,
    "timing": timing_page.figure,
}
