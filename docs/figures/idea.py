"""The pictures of docs/idea.md, each computed here: python docs/figures/idea.py (needs the extra lab).

tests/test_docs.py computes the numbers again, and looks for them in the pictures that are committed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from opnorm import conv_norm

FOLDER = Path(__file__).parents[1] / "img" / "idea"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "opnorm",
    "svg.fonttype": "none",
    "savefig.facecolor": "white",
    "font.size": 11,
}
GREY, RED, ORANGE, BLUE, GREEN = "#6b7280", "#c0392b", "#b3541e", "#2b6cb0", "#2f855a"

EDGE = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
SIZE = 5  # pixels that EDGE runs over, with one zero on each side
ONES = torch.ones(1, 1, 3, 3, dtype=torch.float64)
SIZES = (*range(3, 17), 20, 24, 28, 32, 40, 48, 56, 64)
CHANNELS = 16


def response(kernel: Tensor, omega: Tensor) -> Tensor:
    """|θ̂(ω)| of a kernel in one dimension."""
    taps = torch.arange(len(kernel), dtype=torch.float64)
    return torch.polar(torch.ones(1, dtype=torch.float64), omega[:, None] * taps).matmul(kernel + 0j).abs()


def grid(points: int, phase: float) -> Tensor:
    """The frequencies from 0 to π of a circle of so many points that is closed with a phase."""
    omega = 2 * math.pi * (torch.arange(points, dtype=torch.float64) + phase) / points
    return omega[omega <= math.pi + 1e-12]


def bounds() -> dict[str, float]:
    """The norm of EDGE on SIZE pixels, and the largest response on each circle."""
    circles = {"a circle of N": (SIZE, 0), "N + 2p (2021)": (SIZE + 2, 0)}
    circles |= {"N + p, phase 0": (SIZE + 1, 0), "N + p, phase ½": (SIZE + 1, 0.5)}
    norm = conv_norm(EDGE[None, None], (SIZE,), padding=1, guarantee="exact")
    largest = {name: float(response(EDGE, grid(*circle)).max()) for name, circle in circles.items()}
    return {"norm": float(norm)} | largest


def draw_response() -> Figure:
    """The response of EDGE with the grids of four circles, whole and near its peak, and the norm."""
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    whole, near = figure.subplots(2, 1, height_ratios=(1, 1.35))
    omega = torch.linspace(0, math.pi, 400, dtype=torch.float64)
    for axes in (whole, near):
        axes.plot(omega, response(EDGE, omega), color=GREY, linewidth=1.5)
        axes.set_xticks([0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi], ["0", "π/4", "π/2", "3π/4", "π"])
        axes.grid(alpha=0.25)
    found = bounds()
    norm = found.pop("norm")
    shown = ((SIZE, 0, RED, "v"), (SIZE + 2, 0, ORANGE, "s"), (SIZE + 1, 0, BLUE, "o"), (SIZE + 1, 0.5, GREEN, "D"))
    for (name, value), (points, phase, colour, marker) in zip(found.items(), shown, strict=True):
        at = grid(points, phase)
        label = f"{name}: {value:.3f}" + (", below the norm: no bound" if value < norm - 1e-9 else "")
        for axes in (whole, near):
            axes.plot(at, response(EDGE, at), marker, color=colour, markersize=7, label=label)
        near.plot([2.2, math.pi], [value, value], color=colour, linewidth=1, alpha=0.6)
    near.plot([2.2, math.pi + 0.05], [norm, norm], "k--", linewidth=1.2, label=f"the norm on {SIZE} pixels: {norm:.3f}")
    whole.set(xlim=(-0.05, math.pi + 0.05), ylim=(0, 4.3), ylabel="|θ̂(ω)|")
    whole.set_title("the response of (−1, 2, −1), and the frequencies of four circles", fontsize=11)
    near.set(xlim=(2.2, math.pi + 0.05), ylim=(3.3, 4.1), xlabel="frequency ω", ylabel="|θ̂(ω)|, near its peak")
    near.legend(loc="lower center", bbox_to_anchor=(0.5, -0.66), frameon=False, fontsize=10)
    return figure


def norms(stride: int) -> list[float]:
    """The norm of a 3×3 kernel of ones with padding 1, on each of SIZES."""
    return [float(conv_norm(ONES, (n, n), stride=stride, padding=1, guarantee="exact")) for n in SIZES]


def reshaped(channels: int) -> float:
    """What torch's spectral_norm would divide by: the norm of the kernel, reshaped to a row a channel."""
    return float(torch.linalg.matrix_norm(ONES.expand(channels, 1, 3, 3).flatten(1), 2))


def draw_sizes() -> Figure:
    """The norm by input size and stride, which the kernel alone does not know."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes: Axes = figure.subplots()
    for stride, colour, marker in ((1, BLUE, "o"), (2, GREEN, "D"), (3, ORANGE, "s")):
        values = norms(stride)
        label = f"the norm, stride {stride}: {values[-1]:.2f} on {SIZES[-1]}×{SIZES[-1]}"
        axes.plot(SIZES, values, color=colour, marker=marker, markersize=4, label=label)
    for channels in (1, CHANNELS):
        value = reshaped(channels)
        what = "one channel" if channels == 1 else f"the same on {channels} channels"
        style = "--" if channels == 1 else ":"
        axes.plot(SIZES, [value] * len(SIZES), style, color=RED, linewidth=1.5, label=f"reshaped, {what}: {value:.2f}")
    axes.set(xscale="log", xlabel="pixels a side", ylim=(0, 13), title="a 3×3 kernel of ones, padding 1")
    axes.set_xticks([3, 5, 8, 16, 32, 64], ["3", "5", "8", "16", "32", "64"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=10)
    return figure


FIGURES = {"response": draw_response, "sizes": draw_sizes}


def main(folder: Path = FOLDER) -> None:
    """Draw every figure into a folder, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        with matplotlib.rc_context(STYLE):
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
