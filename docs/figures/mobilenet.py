"""The picture of the README, from results/norms_mobilenet_v2.json: python docs/figures/mobilenet.py (needs lab)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "norms_mobilenet_v2.json"
FILE = ROOT / "docs" / "img" / "mobilenet.svg"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "opnorm",
    "svg.fonttype": "none",
    "savefig.facecolor": "white",
    "font.size": 11,
}
SHOWN = {  # label, colour, marker
    "Runkel2021": ("the paper's bound", "#b3541e", "s"),
    "FourierBound": ("FourierBound", "#2b6cb0", "o"),
    "auto": ("auto; on the axis: exact", "#2f855a", "D"),
}
FLOOR = 1e-5  # what is less is drawn here


def draw(layers: list[dict[str, Any]]) -> Figure:
    """By how much each bound lies above the norm, layer by layer; layers with stride 2 are shaded."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes: Axes = figure.subplots()
    places = range(len(layers))
    for place, layer in zip(places, layers, strict=True):
        if layer["stride"] == 2:
            axes.axvspan(place - 0.5, place + 0.5, color="#e5e7eb", linewidth=0)
    for key, (label, colour, marker) in SHOWN.items():
        values = [max(layer["overestimation"][key], FLOOR) for layer in layers]
        size = 7 if key != "auto" else 4
        axes.plot(places, values, marker, color=colour, markersize=size, label=label, clip_on=False)
    axes.set(yscale="log", ylim=(FLOOR, 2), xlim=(-0.5, len(layers) - 0.5), ylabel="above the norm")
    axes.set_xlabel("depthwise layers by input size; stride 2 shaded")
    axes.set_xticks(places, [str(layer["input"]) for layer in layers])
    axes.tick_params(axis="x", labelsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def main(file: Path = FILE) -> None:
    """Draw it, the same bytes each time."""
    with matplotlib.rc_context(STYLE):
        draw(json.loads(RESULT.read_text())["layers"]).savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
