"""What docs/comparison.md says of the measurements: a pure function of the files under results/peers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from opnorm.lab.bench.contenders import CONTENDERS, REFERENCE, ROUNDING, is_below
from opnorm.lab.bench.layers import CELLS
from opnorm.lab.cli import UsageError
from opnorm.lab.record import write_text

BEGIN, END = "<!-- begin peers -->", "<!-- end peers -->"
Cell = dict[str, Any]
Kind = list[Cell]


def read_cells(folder: Path) -> list[Cell]:
    """The files of a folder, in the order of the layers."""
    files = [folder / f"{cell}.json" for cell in CELLS]
    missing = [file.stem for file in files if not file.is_file()]
    if missing:
        raise UsageError(f"expected a result for every layer in {folder}, got none for {', '.join(missing)}")
    return [json.loads(file.read_text()) for file in files]


def write_page(page: Path, folder: Path) -> None:
    """Put `measured` between the marks of a page, and a figure of each kind of layer beside it."""
    from opnorm.lab.bench.peers_figure import draw

    cells, text = read_cells(folder), page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"expected {BEGIN} and {END} in {page}, got no such marks")
    for kind in kinds(cells):
        draw(kind, page.parent / figure_name(kind))
    write_text(page, f"{before}{BEGIN}\n{measured(cells)}{END}{after}")


def kinds(cells: Iterable[Cell]) -> list[Kind]:
    """The cells of each kind of layer."""
    return [list(some) for _, some in groupby(cells, key=lambda cell: cell["kind"])]


def figure_name(kind: Kind) -> str:
    """Where the figure of a kind is, seen from the page."""
    return f"img/peers/{re.sub(r'[^a-z0-9]+', '-', kind[0]['kind'].lower()).strip('-')}.svg"


def measured(cells: list[Cell]) -> str:
    """Markdown: where and how, three tables of all kinds, and for each kind a figure, what we lose, and its tables."""
    parts = [_setting(cells)]
    for title, entry in (("Value over norm", _ratios), ("Time over that of `auto`", _times), ("MiB", _memory)):
        parts.append(_overview(title, cells, entry))
    for kind in kinds(cells):
        name = kind[0]["kind"]
        parts.append(f"### {name}\n\n![{name}: time against value over norm]({figure_name(kind)})\n")
        parts.append("\n".join(f"* {sentence}" for cell in kind for sentence in sentences(cell)) + "\n")
        parts += [_details(cell) for cell in kind]
    return "\n" + "\n".join(parts) + "\n"


def _setting(cells: list[Cell]) -> str:
    settings, environments = cells[0]["settings"], [cell["environment"] for cell in cells]
    machines = dict.fromkeys(
        f"{e['processor']}, {e['cores']} cores, {e['threads']} threads, {e['gpu'] or 'no GPU'}" for e in environments
    )
    packages = ", ".join(f"{name} {number}" for name, number in settings["packages"].items() if number)
    weights = f"those of `{settings['weights']}`" if settings["weights"] else "Gaussian, as for the other layers"
    calls = f"Medians of {settings['rounds']} interleaved calls"
    return f"{' and '.join(machines)}; {packages}. {calls}. Weights of MobileNetV2: {weights}.\n"


def _overview(title: str, cells: list[Cell], entry: Callable[[Kind, str], str]) -> str:
    columns = kinds(cells)
    head = f"| {title} | {' | '.join(kind[0]['kind'] for kind in columns)} |\n|{' --- |' * (len(columns) + 1)}\n"
    rows = (f"| {name} | {' | '.join(entry(kind, name) for kind in columns)} |\n" for name in CONTENDERS)
    return head + "".join(rows)


def _rows(kind: Kind, name: str) -> list[Cell]:
    return [cell["methods"][name] for cell in kind]


def _ratios(kind: Kind, name: str) -> str:
    rows = _rows(kind, name)
    found = [float(row["ratio"]) for row in rows if "ratio" in row]
    errors = sum("error" in row for row in rows)
    failed = f"error in {errors} of {len(rows)}" if errors else ""
    if not found:
        return failed or ("not installed" if "not_installed" in rows[0] else "no")
    text = _range([ratio_text(value) for value in (min(found), max(found))])
    text = f"**{text}**" if is_below(min(found)) else text
    return f"{text}, {failed}" if failed else text


def _times(kind: Kind, name: str) -> str:
    found = [_of_auto(cell, name) for cell in kind if "ratio" in cell["methods"][name]]
    return _range([_times_text(value) for value in (min(found), max(found))]) if found else ""


def _memory(kind: Kind, name: str) -> str:
    found = [row["peak_bytes"] / 2**20 for row in _rows(kind, name) if "ratio" in row]
    return _range([f"{value:.1f}" for value in (min(found), max(found))]) if found else ""


def _times_text(times: float) -> str:
    return f"{times:.2g}" if times < 10 else f"{times:.0f}"


def _range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _of_auto(cell: Cell, name: str) -> float:
    row = cell["methods"][name]
    if "of_auto" in row:
        return float(row["of_auto"]["median"])
    return float(row["seconds"]["median"] / cell["methods"][REFERENCE]["seconds"]["median"])


def ratio_text(ratio: float) -> str:
    """Value over norm: three decimals, never a value below 1 as 1, and few digits where it is far off."""
    if not 0.001 < ratio < 1000:
        return f"{ratio:.0e}"
    decimals = 6 if is_below(ratio) and round(ratio, 3) == 1 else 3
    return f"{ratio:.{decimals}f}"


def sentences(cell: Cell) -> list[str]:
    """What others do better than `auto` on a layer, and what is fast or tight and no bound."""
    others = {name: row for name, row in cell["methods"].items() if row["family"] != "ours" and "ratio" in row}
    ratios = {name: float(row["ratio"]) for name, row in others.items()}
    auto = float(cell["methods"][REFERENCE]["ratio"])
    above = sorted((name for name in others if not is_below(ratios[name])), key=ratios.__getitem__)
    named = {name: f"{name} ({ratio_text(ratio)})" for name, ratio in ratios.items()}
    faster = [f"{named[name]} in {times:.2g} of the time" for name in above if (times := _of_auto(cell, name)) < 1]
    tighter = [named[name] for name in above if ratios[name] < auto - ROUNDING]
    below = [named[name] for name in others if is_below(ratios[name])]
    return [
        f"{cell['layer']}: `auto` {ratio_text(auto)}. "
        f"Not below the norm and faster: {_list(faster)}. "
        f"Not below the norm and tighter: {_list(tighter)}. "
        f"Below the norm: {_list(below)}."
    ]


def _list(items: list[str]) -> str:
    return ", ".join(items) or "none"


def _details(cell: Cell) -> str:
    lines = [
        "| | guarantee | value / norm | milliseconds | quartiles | of `auto` | MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_line(cell, name) for name in CONTENDERS),
    ]
    return f'??? note "{cell["layer"]}: norm {cell["norm"]:.4f}"\n\n' + "".join(f"    {line}\n" for line in lines)


def _line(cell: Cell, name: str) -> str:
    row = cell["methods"][name]
    if "ratio" not in row:
        key = next(key for key in ("refused", "error", "not_installed") if key in row)
        return f"| {name} | | {key.replace('_', ' ')}: {row[key].replace('|', ' ')} | | | | |"
    ratio, seconds = float(row["ratio"]), row["seconds"]
    value = f"**{ratio_text(ratio)}**" if is_below(ratio) else ratio_text(ratio)
    spread = f"{1e3 * seconds['low']:.2f} to {1e3 * seconds['high']:.2f}" if row["rounds"] > 1 else "one call"
    times = f"{1e3 * seconds['median']:.2f} | {spread} | {_of_auto(cell, name):.2g}"
    return f"| {name} | {row.get('guarantee', '')} | {value} | {times} | {row['peak_bytes'] / 2**20:.1f} |"
