"""Figure 3 on the page: what its claims are, its section and its figure, as functions of imagenet.json alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.prose import caption, command, origin, table
from opnorm.lab.sweep_grid import label_of

Result = dict[str, Any]
LEARNED = 2.0  # times the accuracy of chance


def claims(result: Result) -> dict[str, bool]:
    """What figure 3 shows, and whether it does."""
    accuracies = [cell["test_accuracy"] or 0.0 for cell in _cells(result)]
    return {
        "With the published learning rate and start of s, no run diverges.": all(
            cell["status"] == "finished" for cell in _cells(result)
        ),
        "Every network is right twice as often as by chance or more, and the accuracy rises from each K to the next.": (
            len(accuracies) > 1
            and min(accuracies) >= LEARNED / result["data"]["classes"]
            and all(later > earlier for earlier, later in pairwise(accuracies))
        ),
    }


def section(result: Result) -> str:
    """Figure 3, and what can be said by it."""
    data, settings = result["data"], result["settings"]
    rows = [
        (label_of(c["cell"]["K"]), f"{c['lr']:g}", f"{c['s_init']:g}", *map(_percent, _both(c)), _outcome(c))
        for c in _cells(result)
    ]
    return f"""
## MobileNetV2 by K: figure 3

{command(result)}: MobileNetV2 without batch norm, soft scaling, K the norm of each layer, the paper's learning rate and
start of s for each K, SGD with momentum 0.9. {data["training"]:,} training and {data["test"]:,} test images of
{data["classes"]:,} classes, cropped to {data["shape"][1]}×{data["shape"][2]}; {settings["epochs"]} epochs, batches of
{settings["batch_size"]}. {origin(result)}

![Accuracy of the likeliest class and of the five likeliest, by K](img/results/imagenet.svg)

{caption(claims(result))}{_warning(result)}

{table(("K", "learning rate", "s at the start", "top 1", "top 5", "run"), rows)}

{NOISE["imagenet"]}
"""


def figure(result: Result) -> Figure:
    """Top-1 and top-5 accuracy by K, and that of chance."""
    cells, classes = _cells(result), result["data"]["classes"]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    places = [cell["cell"]["K"] for cell in cells]
    for index, (label, marker) in enumerate((("top 1", "o"), ("top 5", "s"))):
        values = [float("nan") if _both(c)[index] is None else 100 * _both(c)[index] for c in cells]
        (line,) = axes.plot(places, values, marker=marker, label=label)
        chance = 100 * min(1.0, (1, 5)[index] / classes)
        axes.axhline(chance, color=line.get_color(), linestyle=":", linewidth=1, label=f"{label} by chance")
    for K in [cell["cell"]["K"] for cell in cells if cell["status"] == "diverged"]:
        axes.annotate("diverged", (K, 0), rotation=90, ha="center", va="bottom", fontsize=8, color="0.4")
    axes.set_xticks(places, [label_of(K) for K in places])
    axes.set(xlabel="K", ylabel="accuracy in %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _cells(result: Result) -> list[dict[str, Any]]:
    return sorted(result["cells"].values(), key=lambda cell: cell["cell"]["K"])


def _both(cell: dict[str, Any]) -> tuple[Any, Any]:
    return cell["test_accuracy"], cell["top5_accuracy"]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _outcome(cell: dict[str, Any]) -> str:
    return f"diverged: {cell['reason']}" if cell["status"] == "diverged" else str(cell["status"])


def _warning(result: Result) -> str:
    """What runs that are so short are good for."""
    if result["profile"] != "small":
        return ""
    return (
        " This profile proves that the pipeline works, from files of images to this page. Runs so short on images so "
        "small say nothing about K, and are no reproduction of the paper's accuracies."
    )
