"""Table 1 on the page: what its claims are, its section and its figure, as functions of cifar-grid.json alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.prose import caption, command, origin, percent, table
from opnorm.lab.paper.runs import milestones
from opnorm.lab.sweep_grid import label_of
from opnorm.lab.sweep_show import MARKS, draw_panel, panels_of

Result = dict[str, Any]
Cell = Mapping[str, Any]
# Table 1 of the paper: for each K the best test accuracy in %, its learning rate, and its scaling.
PUBLISHED = {
    1: (16.64, 1e-4, "hard"), 2: (55.65, 1e-2, "soft"), 3: (74.73, 1e-2, "hard"), 4: (85.65, 1e-2, "soft"),
    5: (90.74, 1e-2, "soft"), 6: (88.60, 1e-3, "hard"), 7: (85.36, 1e-3, "soft"), 8: (81.21, 1e-4, "hard"),
    9: (52.25, 1e-5, "soft"), 10: (10.00, math.nan, ""),
}  # fmt: skip
MILESTONES = (1 / 2, 5 / 6)  # of a run, where the learning rate falls
SLACK = 0.01  # of the accuracy, below which two best runs count as equal
CHANCE = 3.0  # standard deviations above the accuracy of chance that still count as chance


class Best(NamedTuple):
    """The best run for a K; `learned` where it is better than chance."""

    accuracy: float
    lr: float
    scaling: str
    learned: bool


def claims(result: Result) -> dict[str, bool]:
    """The three findings of the paper, and whether they hold."""
    best = best_of(result)
    learned = {K: found for K, found in best.items() if found.accuracy >= 2 / result["data"]["classes"]}
    rates = [found.lr for found in learned.values()]
    return {
        "The best learning rate falls as K grows: it never rises from one K to the next, and is lower in the end than "
        "in the beginning, among the K with which twice as many images are classified rightly as by chance.": (
            len(rates) > 1 and rates == sorted(rates, reverse=True) and rates[-1] < rates[0]
        ),
        "The accuracy of the best run rises with K and then falls, but for differences of less than one percentage "
        "point.": rises_then_falls([found.accuracy for found in best.values()]),
        "Too high a learning rate collapses training: for each of these K there is a rate above the best one with "
        "which every run ends at chance or without finite weights.": (
            bool(learned) and all(_collapses_above(result, K, found.lr) for K, found in learned.items())
        ),
    }  # fmt: skip


def best_of(result: Result) -> dict[float, Best]:
    """For each K that any run has ended with, its best run; that of the lowest rate where several are as good."""
    found: dict[float, Best] = {}
    for cell in result["cells"].values():
        K, accuracy = cell["cell"]["K"], accuracy_of(cell)
        if K not in found or accuracy > found[K].accuracy:
            found[K] = Best(accuracy, cell["cell"]["lr"], cell["cell"]["scaling"], not collapsed(cell, result))
    return dict(sorted(found.items()))


def accuracy_of(cell: Cell) -> float:
    """What the table has of a run; 0 of one that diverged."""
    return float(cell["test_accuracy"] or 0.0)


def rises_then_falls(values: list[float]) -> bool:
    """Whether the largest value lies inside, and the others rise to it and fall from it, by `SLACK` or so."""
    top = values.index(max(values))
    rising, falling = values[: top + 1], values[top:]
    up = all(later > earlier - SLACK for earlier, later in pairwise(rising))
    down = all(later < earlier + SLACK for earlier, later in pairwise(falling))
    return up and down and values[0] < values[top] - SLACK and values[-1] < values[top] - SLACK


def collapsed(cell: Cell, result: Result) -> bool:
    """Whether a run diverged or has ended at the accuracy of chance."""
    chance = 1 / result["data"]["classes"]
    threshold = chance + CHANCE * math.sqrt(chance * (1 - chance) / result["data"]["test"])
    return bool(cell["status"] == "diverged" or accuracy_of(cell) <= threshold)


def section(result: Result) -> str:
    """Table 1 and what holds of it."""
    settings, data = result["settings"], result["data"]
    images = f"{data['training']:,} training and {data['test']:,} test images"
    seconds = sum(cell["seconds"] or 0.0 for cell in result["cells"].values())
    return f"""
## Norm and learning rate on CIFAR-10: table 1

{command(result)}: ds_resnet34, K the norm of every separable convolution and of the last layer, SGD with momentum 0.9,
batches of 128. {_how_much(settings)} {images}; {settings["epochs"]} epochs{_schedule(settings)};
{len(result["cells"])} runs of one seed, {seconds / 3600:.1f} hours of training in all. {origin(result)}

![Test accuracy by K and learning rate, and the best of each K](img/results/cifar-grid.svg)

{caption(claims(result))}

Test accuracy in %, hard / soft scaling; {_marks(result)}

{_table(result)}

The published numbers are those of 64 channels, 50,000 training images and 300 epochs. There too the best rate of K = 1
is below that of K = 2: with K = 1 no rate learns much.

{NOISE["cifar-grid"]}
"""


def figure(result: Result) -> Figure:
    """Heat maps by K and learning rate, and the best accuracy by K beside the published one."""
    sweep = {"grid": _grid(result), "rows": [*result["cells"].values()]}
    panels = panels_of(sweep)
    found = [100 * accuracy_of(cell) for cell in sweep["rows"] if cell["status"] == "finished"] or [0.0]
    low, high = min(found), max(max(found), min(found) + 1)
    drawn = Figure(figsize=(12, 1.4 + 0.33 * len(panels[0].cells)), layout="constrained")
    *maps, beside = drawn.subplots(1, len(panels) + 1, width_ratios=[1.0] * len(panels) + [1.25])
    for axes, panel in zip(maps, panels, strict=True):
        image = draw_panel(axes, panel, low, high)
    drawn.colorbar(image, ax=maps, label="test accuracy in %", fraction=0.04)
    best = best_of(result)
    published = {K: accuracy for K, (accuracy, _, _) in PUBLISHED.items() if K in best}
    beside.plot([*published], [*published.values()], "--", color="0.5", marker=".", label="published")
    beside.plot([*best], [100 * b.accuracy for b in best.values()], "-", color="#2b6cb0", marker="o", label="here")
    for K, b in ((K, b) for K, b in best.items() if b.learned):
        place = (K, 100 * b.accuracy)
        beside.annotate(label_of(b.lr), place, (0, 6), textcoords="offset points", ha="center", fontsize=7)
    # room for the legend above, since below it would hide something
    beside.set(xlabel="K", ylabel="best test accuracy in %", ylim=(0, 118))
    beside.set_title("best of each K, with its learning rate", fontsize=10)
    beside.grid(alpha=0.3)
    beside.legend(loc="upper center", ncols=2)
    return drawn


def _grid(result: Result) -> dict[str, list[Any]]:
    return {"K": result["settings"]["K"], "lr": result["settings"]["lr"], "scaling": ["hard", "soft"]}


def _collapses_above(result: Result, K: float, best: float) -> bool:
    """Whether there is a rate above the best one with which every run of this K collapses."""
    rates = [lr for lr in result["settings"]["lr"] if lr > best]
    return any(all(collapsed(cell, result) for cell in _of(result, K=K, lr=lr)) for lr in rates)


def _of(result: Result, **wanted: Any) -> list[Cell]:
    cells: Iterable[Cell] = result["cells"].values()
    return [cell for cell in cells if all(cell["cell"][name] == value for name, value in wanted.items())]


def _table(result: Result) -> str:
    grid, best = _grid(result), best_of(result)
    rows = []
    for K in grid["K"]:
        cells = [" / ".join(_text(cell, best[K]) for cell in _of(result, K=K, lr=lr)) for lr in grid["lr"]]
        accuracy, rate, _ = PUBLISHED.get(K, (math.nan, math.nan, ""))
        published = "" if math.isnan(accuracy) else f"{accuracy:.2f}" + ("" if math.isnan(rate) else f" at {rate:g}")
        rows.append((label_of(K), *cells, published))
    return table(("K", *map(label_of, grid["lr"]), "published best"), rows)


def _text(cell: Cell, best: Best) -> str:
    if cell["status"] in MARKS:
        return MARKS[cell["status"]]
    text = f"{100 * accuracy_of(cell):.2f}"
    held = (cell["cell"]["lr"], cell["cell"]["scaling"]) == (best.lr, best.scaling)
    return f"**{text}**" if held and best.learned else text


def _marks(result: Result) -> str:
    diverged = any(cell["status"] == "diverged" for cell in result["cells"].values())
    chance = percent(1 / result["data"]["classes"], 0)
    return (
        "bold is the best for a K" + f", {MARKS['diverged']} a run that diverged" * diverged + f". Chance is {chance}."
    )


def _schedule(settings: Mapping[str, Any]) -> str:
    found = milestones(settings["epochs"], MILESTONES).get("milestones", [])
    return f", the rate divided by ten after {' and '.join(map(str, found))}" if found else ""


def _how_much(settings: Mapping[str, Any]) -> str:
    """Why it is less than was published, where it is."""
    if settings["width"] >= 64 and settings["epochs"] >= 300:
        return "The network and the epochs are those of the paper."
    return (
        f"The network has {settings['width']} channels in its first stage, where the paper has 64: with those, not one "
        "epoch of each run fits into the two hours on two cores that this table is meant to take."
    )
