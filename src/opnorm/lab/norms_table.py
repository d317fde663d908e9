"""The table of `opnorm norms`: all columns where the terminal is wide enough, else the geometry in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from opnorm.lab.cli import console_width

Row = Mapping[str, Any]
Columns = dict[str, tuple[Callable[[Row], str], dict[str, Any]]]
SIGNS = {"exact": "=", "upper": "≤", "lower": "≥", "none": "≈"}
TEXT: dict[str, Any] = {"no_wrap": True}
NUMBER: dict[str, Any] = {"no_wrap": True, "justify": "right"}


def show(report: Row, weights: str) -> None:
    """Print the rows of a report as a table, and below it what they come to and what is missing."""
    console = Console(width=console_width(), highlight=False)
    sizes = " and ".join(sizes_text(shape) for shape in report["input"]) or "inputs of any size"
    console.print(f"{report['model']} on {sizes}, {weights}", style="bold", markup=False)
    table = _table(report, _all_columns(report), gap=2)
    if Measurement.get(console, console.options.update(width=10_000), table).maximum > console.width:
        table = _table(report, _few_columns(report), gap=1)
    console.print(table)
    for line in _notes(report):
        console.print(line, markup=False)


def sizes_text(values: Sequence[int | str | None], times: str = "×") -> str:
    """(3, None) as "3×any"."""
    return times.join("any" if n is None else str(n) for n in values)


def number_text(value: float | None, guarantee: str | None, *, sign: bool = False) -> str:
    """Five digits, rounded to the side on which the guarantee stays true; "≤ 1.2346" with the sign of the guarantee."""
    if value is None or guarantee is None:
        return "–"
    rounding = {"upper": ROUND_CEILING, "lower": ROUND_FLOOR}.get(guarantee, ROUND_HALF_EVEN)
    digits = Context(prec=5, rounding=rounding).create_decimal_from_float(value)
    return (f"{SIGNS[guarantee]} " if sign else "") + f"{float(digits):#.5g}"


def _table(report: Row, columns: Columns, gap: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
    for title, (_, options) in columns.items():
        table.add_column(title, **options)
    for row in report["layers"]:
        table.add_row(*(cell(row) for cell, _ in columns.values()))
    return table


def _all_columns(report: Row) -> Columns:
    columns: Columns = {
        "layer": (_name, TEXT),
        "kind": (lambda row: row["kind"] + " transposed" * row["transposed"], TEXT),
        "channels": (lambda row: f"{row['in_channels']}→{row['out_channels']}", NUMBER),
        "kernel": (lambda row: sizes_text(row["kernel_size"]), NUMBER),
        "stride": (lambda row: sizes_text(row["stride"]), NUMBER),
        "input": (lambda row: sizes_text(row["input_size"]), NUMBER),
        "norm": (lambda row: number_text(row["norm"], row["guarantee"]), NUMBER),
        "guarantee": (lambda row: row["guarantee"] or "", TEXT),
        "method": (_method, TEXT),
    }
    return columns | {name: (_against(name, values=True), NUMBER) for name in _compared(report)}


def _few_columns(report: Row) -> Columns:
    columns: Columns = {
        "layer": (_name, {"overflow": "fold"}),
        "geometry": (_geometry, TEXT),
        "norm": (lambda row: number_text(row["norm"], row["guarantee"], sign=True), NUMBER),
    }
    others: Columns = {name: (_against(name, values=False), NUMBER) for name in _compared(report)}
    return columns | (others or {"method": (_method, TEXT)})


def _compared(report: Row) -> list[str]:
    return list(report["layers"][0].get("compare", {}))


def _name(row: Row) -> str:
    return row["name"] or "(the model)"


def _method(row: Row) -> str:
    return row["method"].partition("(")[0]


def _geometry(row: Row) -> str:
    """As in "depthwise 32, 3×3/2 on 56×56": what goes without saying is left out."""
    into, out = row["in_channels"], row["out_channels"]
    kernel = "" if set(row["kernel_size"]) <= {1} else sizes_text(row["kernel_size"])
    strides = row["stride"][:1] if len({*row["stride"]}) == 1 else row["stride"]
    stride = "" if set(strides) <= {1} else f"/{sizes_text(strides)}"
    text = row["kind"] + "ᵀ" * row["transposed"] + (f" {into}" if into == out else f" {into}→{out}")
    text += f", {kernel}{stride}" if kernel or stride else ""
    return text + (f" on {sizes_text(row['input_size'])}" if row["input_size"] else "")


def _against(name: str, *, values: bool) -> Callable[[Row], str]:
    """What the method `name` says, and by how much it differs from the norm of the row."""

    def cell(row: Row) -> str:
        other = row["compare"][name]
        text = number_text(other["norm"], other["guarantee"])
        if not other["norm"] or not row["norm"]:
            return text
        percent = f"{round(100 * (other['norm'] / row['norm'] - 1), 1) + 0.0:+.1f} %"  # + 0.0: no "-0.0"
        return f"{text} {percent:>8}" if values else percent

    return cell


def _notes(report: Row) -> Iterator[str]:
    rows = [row for row in report["layers"] if row["norm"] is not None]
    if rows:
        largest = max(rows, key=lambda row: row["norm"])
        value = number_text(largest["norm"], largest["guarantee"], sign=True)
        kinds = {"exact": "= exact", "upper": "≤ upper bound", "lower": "≥ lower bound", "none": "≈ neither"}
        legend = ", ".join(text for kind, text in kinds.items() if any(row["guarantee"] == kind for row in rows))
        yield f"\n{len(report['layers'])} layers; the largest norm is {value} ({_name(largest)})   [{legend}]"
    for row in report["layers"]:
        if row["norm"] is None:
            yield f"no norm: {_name(row)}: {row['reason']}"
    for name, reason in report["left_out"].items():
        yield f"left out: {name or 'the model'}: {reason}"
