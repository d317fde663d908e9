"""Time against overestimation, a panel for each layer: a figure that is a function of the results alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from opnorm.lab.bench.contenders import is_below

Cell = dict[str, Any]
TOP = 10.0  # what is further above the norm is drawn here, with its value
LINEAR = 1e-4  # the overestimation below which the axis is linear
TICKS = (-0.9, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1, 10)
STYLES = {"ours": ("#0b5fb0", "o", 8), "published": ("#555555", "o", 5), "package": ("#b86200", "s", 6)}
NAMES = {"ours": "this library", "published": "published methods, our code", "package": "other packages"}
BELOW = "#cc0000"
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.5}
DISTANCES = (9, 16, 26, 38, 52, 70, 90)  # points, of a label from its point


def draw(kind: list[Cell], path: Path) -> None:
    """Draw a panel for each layer of a kind, two in a row, into a file that is what its ending says."""
    rows = -(-len(kind) // 2)
    with matplotlib.rc_context({"svg.hashsalt": "opnorm", "font.size": 9}):
        figure = Figure(figsize=(10, 4.2 * rows + 0.4), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, 2, squeeze=False).flat)
        for axis in axes[len(kind) :]:
            axis.set_axis_off()
        points = [_panel(axis, cell) for axis, cell in zip(axes, kind, strict=False)]
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
        canvas.draw()  # the layout, without which no label knows where it is
        figure.set_layout_engine("none")
        for axis, some in zip(axes, points, strict=False):
            _label(axis, some, canvas.get_renderer())
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


Point = tuple[float, float, str, str]  # milliseconds, overestimation, label, colour


def _panel(axis: Axes, cell: Cell) -> list[Point]:
    points = []
    for name, row in sorted(cell["methods"].items(), key=lambda item: item[1]["family"] == "ours"):
        if "ratio" not in row or math.isnan(ratio := float(row["ratio"])):
            continue
        colour, marker, size = STYLES[row["family"]]
        colour = BELOW if (below := is_below(ratio)) else colour
        x, y = 1e3 * row["seconds"]["median"], min(ratio - 1, TOP)
        axis.plot(x, y, marker, color=colour, markersize=size, zorder=3, **(HOLLOW if below else {}))
        label = f"{name} (×{ratio:.3g})" if ratio - 1 > TOP else name
        points.append((x, y, label, colour))
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    axis.axhspan(-1, 0, color=BELOW, alpha=0.06, linewidth=0)
    axis.axhline(0, color="black", linewidth=0.8)
    lowest = min((y for _, y, _, _ in points), default=0.0)
    axis.set_ylim(min(3 * lowest, -5 * LINEAR) if lowest > -0.3 else -1, 3 * TOP)
    times = [x for x, _, _, _ in points]
    axis.set_xlim(min(times) / 3, max(times) * 6)
    axis.yaxis.set_major_locator(FixedLocator(TICKS))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g} %" if value else "the norm"))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(alpha=0.25)
    axis.set(title=cell["layer"], xlabel="milliseconds", ylabel="above or below the norm")
    return points[::-1]  # ours are drawn last, so on top, and are labelled first


def _legend() -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="", color=colour, marker=marker, markersize=size, label=NAMES[family])
        for family, (colour, marker, size) in STYLES.items()
    ]
    below = Line2D([], [], linestyle="", color=BELOW, marker="o", label="below the norm: not a bound", **HOLLOW)
    return [*handles, below]


def _label(axis: Axes, points: list[Point], renderer: RendererAgg) -> None:
    """Put each label at the first place near its point that is free, and draw a line to it if that is far."""
    inside = axis.get_window_extent(renderer)
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axis.transData.transform([p[:2] for p in points])]
    for x, y, label, colour in points:
        text = axis.annotate(label, (x, y), (0, 0), textcoords="offset points", fontsize=8, color=colour, va="center")
        best = None
        for dx, dy, align in _places():
            text.set(position=(dx, dy), horizontalalignment=align)
            box = text.get_window_extent(renderer)
            overlap = sum(_area(box, other) for other in taken) + 10 * (_size(box) - _area(box, inside))
            if best is None or overlap < best[0]:
                best = overlap, dx, dy, align, box
            if overlap <= 0:
                break
        assert best is not None
        _, dx, dy, align, box = best
        text.set(position=(dx, dy), horizontalalignment=align)
        taken.append(box)
        if math.hypot(dx, dy) > DISTANCES[1]:
            line = {"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.7}
            axis.annotate("", (x, y), (dx, dy), textcoords="offset points", arrowprops=line)


def _places() -> Iterator[tuple[float, float, str]]:
    for distance in DISTANCES:
        for angle in (0, 180, 45, -45, 135, -135, 90, -90, 20, -20, 160, -160):
            dx, dy = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            yield dx, dy, "center" if abs(dx) < 1 else "left" if dx > 0 else "right"


def _area(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return _size(common) if common else 0.0


def _size(box: Bbox) -> float:
    return float(box.width * box.height)
