"""The picture of the CIFAR-10 runs, from results/cifar10_*.json: python docs/figures/cifar10.py (needs lab)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "img" / "cifar10.svg"
RUNS = {  # file, colour, line
    "K5_hard": ("K = 5, hard", "#2b6cb0", "-"),
    "K5_soft": ("K = 5, soft", "#2b6cb0", "--"),
    "K6_hard": ("K = 6, hard", "#b3541e", "-"),
    "K6_soft": ("K = 6, soft", "#b3541e", "--"),
}
STYLE: dict[str, Any] = {
    "svg.hashsalt": "opnorm",
    "svg.fonttype": "none",
    "savefig.facecolor": "white",
    "font.size": 11,
}


def results() -> dict[str, dict[str, Any]]:
    """The result of each run, as `opnorm train` wrote it."""
    return {name: json.loads((ROOT / "results" / f"cifar10_{name}.json").read_text()) for name in RUNS}


def draw(runs: dict[str, dict[str, Any]]) -> Figure:
    """Test accuracy and training loss by epoch."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, result in runs.items():
        label, colour, line = RUNS[name]
        epochs = [r["epoch"] for r in result["history"]]
        left.plot(epochs, [100 * r["test_accuracy"] for r in result["history"]], line, color=colour, label=label)
        right.plot(epochs, [r["train_loss"] for r in result["history"]], line, color=colour)
    left.set(xlabel="epoch", ylabel="test accuracy in %", ylim=(0, 80))
    right.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def main(file: Path = FILE) -> None:
    """Draw it, the same bytes each time."""
    with matplotlib.rc_context(STYLE):
        draw(results()).savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
