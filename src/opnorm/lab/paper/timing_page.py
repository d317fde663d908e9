"""What docs/results.md says of `opnorm reproduce timing`: claims, section and figure, functions of its JSON."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.prose import caption, command, origin, table

Result = dict[str, Any]
BARE, OURS, PAPER = "no normalisation", "Normalizer", "the paper's method"
COLOURS = {OURS: "#2b6cb0", PAPER: "#b3541e"}
# Table 2 of the paper, on NVIDIA V100: seconds of an epoch with and without, and their ratio.
PUBLISHED = {"ds_resnet34": (59.59, 36.63, 1.63), "mobilenet_v2": (3074.0, 3016.0, 1.02)}
TITLES = {"ds_resnet34": "CIFAR-10, ds_resnet34", "mobilenet_v2": "ImageNet, MobileNetV2"}


def timing_claims(result: Result) -> dict[str, bool]:
    """What table 2 shows, and whether it does."""
    cells = result["cells"]
    return {
        "On both networks `Normalizer` adds no more to an epoch than the paper's method, which is measured beside it, "
        "as far as quartiles tell.": all(_ratio(c, OURS)["low"] <= _ratio(c, PAPER)["high"] for c in cells.values()),
        "The factor of `Normalizer` is no larger than the published one of the paper's method.": all(
            _factor(c, OURS) <= PUBLISHED[name][2] for name, c in cells.items()
        ),
    }


def timing(result: Result) -> str:
    """Table 2: seconds of an epoch, and the factor, ours, the paper's, and as published."""
    rows = []
    for network, cell in result["cells"].items():
        with_paper, without, published = PUBLISHED[network]
        for name in (BARE, OURS, PAPER):
            seconds, ratio = cell["epoch"][name]["median"], cell["step"][name]["ratio"]
            spread = "" if name == BARE else f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            shown = {BARE: (f"{without:g} s", "1"), PAPER: (f"{with_paper:g} s", f"{published:g}")}.get(name, ("", ""))
            rows.append((network, name, f"{seconds:.1f} s", f"{ratio['median']:.3f}", spread, *shown))
    head = ("network", "", "an epoch here", "factor", "quartiles", "published: an epoch", "factor")
    rounds = result["settings"]["rounds"]
    return f"""
## Time of an epoch: table 2

{command(result)}: steps of the real training loop, with reading, augmentation, forward and backward pass, optimizer and
normalisation, of three runs that take turns in one process. Medians of {rounds} steps each, scaled to an epoch; the
factor is the median of the ratios to the step without normalisation in the same round. {origin(result)}

![Factor on the time of an epoch](img/results/timing.svg)

{caption(timing_claims(result))}

{table(head, rows)}

{" ".join(_setting(network, cell) for network, cell in result["cells"].items())} Where nothing is said of it, the
settings are those of the paper's timing experiments. The learning rate is small enough that the power iteration of the
paper's method stops where it started, which is the best that it can have. That method is its own, layer by layer, after
each step of the optimizer: an FFT for each depthwise layer, and power iteration for pointwise and linear ones, with
hard scaling; dense convolutions, which it does not cover, stay as they are. The published
times are those of other data and of GPUs: of them the factors alone can be compared.

{NOISE["timing"]}
"""


def figure(result: Result) -> Figure:
    """A bar for each factor, with its quartiles, and a star where the published one is."""
    drawn = Figure(figsize=(8, 1.2 + 1.3 * len(result["cells"])), layout="constrained")
    axes = drawn.subplots()
    places = []
    for row, (network, cell) in enumerate(result["cells"].items()):
        for offset, name in ((-0.18, OURS), (0.18, PAPER)):
            ratio = cell["step"][name]["ratio"]
            middle = ratio["median"]
            errors = [[middle - ratio["low"]], [ratio["high"] - middle]]
            label = name if row == 0 else None
            axes.barh(row + offset, middle - 1, 0.34, left=1, color=COLOURS[name], label=label, xerr=errors, capsize=3)
        published = PUBLISHED[network][2]
        axes.plot([published], [row + 0.18], "k*", markersize=10, label=None if row else "the paper, as published")
        places.append(TITLES[network])
    axes.set_yticks(range(len(places)), places)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time of an epoch, as a multiple of that without normalisation")
    axes.grid(axis="x", alpha=0.3)
    drawn.legend(loc="outside lower center", ncols=3, frameon=False)
    return drawn


def _factor(cell: dict[str, Any], name: str) -> float:
    return _ratio(cell, name)["median"]


def _ratio(cell: dict[str, Any], name: str) -> dict[str, float]:
    ratio: dict[str, float] = cell["step"][name]["ratio"]
    return ratio


def _setting(network: str, cell: dict[str, Any]) -> str:
    data = cell["data"]
    notes = f" ({'; '.join(data['notes'])})" if data["notes"] else ""
    size = "×".join(map(str, data["shape"]))
    return (
        f"{network}: {data['images']:,} training images{notes} of {size}, batches of {cell['batch']}, "
        f"{cell['steps of an epoch']:g} steps to an epoch, {cell['scaling']} scaling with K = {cell['K']:g}."
    )
