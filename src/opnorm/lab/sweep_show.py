"""`tables_of` and `figure_of`: what a sweep came to, as functions of its sweep.json alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.table import Table

from opnorm.lab.sweep_grid import label_of

Row = Mapping[str, Any]
MARKS = {"diverged": "×", "failed": "!"}  # in the figure; what has no result yet is left empty
WIDE = 4  # panels in a row


@dataclass(frozen=True)
class Panel:
    """A table of the grid: its first setting down, its second across, all others fixed.

    Attributes:
        title: the others.
        down, across: the names of the two settings; the first is "" for a grid of one.
        labels: of the rows and of the columns.
        cells: the runs.
    """

    title: str
    down: str
    across: str
    labels: tuple[list[str], list[str]]
    cells: list[list[Row]]

    def best(self, i: int) -> int | None:
        """The column of the best run in a row; the first where several are as good."""
        accuracies = [-1.0 if row["test_accuracy"] is None else row["test_accuracy"] for row in self.cells[i]]
        return accuracies.index(max(accuracies)) if max(accuracies) >= 0 else None


def panels_of(sweep: Row) -> list[Panel]:
    """The grid in tables, in the order of its file."""
    grid = sweep["grid"] if len(sweep["grid"]) > 1 else {"": [None]} | sweep["grid"]
    rows = {_key(row["cell"]): row for row in sweep["rows"]}
    down, across, *others = grid
    panels = []
    for values in itertools.product(*(grid[name] for name in others)):
        fixed = dict(zip(others, values, strict=True))
        cells = [[rows[_key(fixed | {down: i, across: j})] for j in grid[across]] for i in grid[down]]
        labels = [label_of(v) for v in grid[down]] if down else ["accuracy"], [label_of(v) for v in grid[across]]
        title = ", ".join(f"{name} {label_of(value)}" for name, value in fixed.items())
        panels.append(Panel(title, down, across, labels, cells))
    return panels


def tables_of(sweep: Row) -> Iterator[Table]:
    """The test accuracies in %, a table a panel; * marks the best of its row."""
    for panel in panels_of(sweep):
        corner = f"{panel.down} \\ {panel.across}" if panel.down else panel.across
        table = Table(title=panel.title or None, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for label in (corner, *panel.labels[1]):
            table.add_column(label, justify="right", no_wrap=True)
        for i, (label, row) in enumerate(zip(panel.labels[0], panel.cells, strict=True)):
            best = panel.best(i)
            table.add_row(label, *(_text(cell) + ("*" if j == best else " ") for j, cell in enumerate(row)))
        yield table


def figure_of(sweep: Row) -> Figure:
    """A heat map of the test accuracies, a panel for each of the settings that are neither down nor across."""
    panels = panels_of(sweep)
    across, down = min(WIDE, len(panels)), -(-len(panels) // WIDE)
    height, width = len(panels[0].cells), len(panels[0].cells[0])
    size = (1.5 + across * max(2.2, 0.9 + 0.62 * width), 0.6 + down * (1.1 + 0.36 * height))
    figure = Figure(figsize=size, layout="constrained")
    found = [row["test_accuracy"] for row in sweep["rows"] if row["test_accuracy"] is not None]
    low, high = (100 * min(found), 100 * max(found)) if found else (0.0, 100.0)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for place, panel in zip(axes, panels, strict=False):
        image = draw_panel(place, panel, low, high if high > low else low + 1)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    figure.colorbar(image, ax=axes.tolist(), label="test accuracy in %")
    figure.supxlabel("box: the best of its row" + _legend(sweep), fontsize=8)
    return figure


def draw_panel(axes: Any, panel: Panel, low: float, high: float) -> Any:
    """Draw one as a heat map, its colours from `low` to `high` %; the image, for a colour bar."""
    numbers = [[_percent(cell) for cell in row] for row in panel.cells]
    image = axes.imshow(numbers, vmin=low, vmax=high, cmap="viridis", aspect="auto")
    axes.set_facecolor("0.85")  # where there is no number
    for i, row in enumerate(panel.cells):
        for j, cell in enumerate(row):
            bright = numbers[i][j] > (low + high) / 2
            text = _text(cell) if cell["status"] == "finished" else MARKS.get(cell["status"], "")
            colour = "black" if bright or cell["test_accuracy"] is None else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
        best = panel.best(i)
        if best is not None:
            axes.add_patch(Rectangle((best - 0.46, i - 0.44), 0.92, 0.88, fill=False, edgecolor="red", linewidth=1.6))
    axes.set_yticks(range(len(panel.cells)), panel.labels[0])
    axes.set_xticks(range(len(panel.cells[0])), panel.labels[1])
    axes.set(ylabel=panel.down, xlabel=panel.across, title=panel.title)
    return image


def _legend(sweep: Row) -> str:
    there = {row["status"] for row in sweep["rows"]}
    return "".join(f"; {mark}: {status}" for status, mark in MARKS.items() if status in there)


def _text(row: Row) -> str:
    if row["test_accuracy"] is not None:
        return f"{_percent(row):.2f}"
    return row["status"] if row["status"] in MARKS else "–"


def _percent(row: Row) -> float:
    return float("nan") if row["test_accuracy"] is None else 100 * row["test_accuracy"]


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in cell.items() if name}, sort_keys=True)
