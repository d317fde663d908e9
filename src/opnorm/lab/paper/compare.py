"""`opnorm reproduce compare FOLDER`: whether results that were made again are the same within their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.paper import EXPERIMENTS
from opnorm.lab.paper.cells import read_result
from opnorm.lab.paper.noise import Gap, gaps

PROGRAM = "opnorm reproduce compare"
SHOWN = 10  # differences of an experiment that are printed one by one


@dataclass(frozen=True)
class Compare:
    """Compare results with those that were made again, by the noise that each section of the page states.

    The exit code is 0 where all that both have are within it, and 1 where one lies apart.

    For example:
      opnorm reproduce compare runs/again
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Where the results are that were made again."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("results")
    """Where the first ones are."""


def main(argv: Sequence[str]) -> int:
    """Compare and print; 1 where something lies apart."""
    options = parse(Compare, argv, PROGRAM)
    found = {name: [read_result(folder, name) for folder in (options.out, options.folder)] for name in EXPERIMENTS}
    if not any(all(pair) for pair in found.values()):
        raise UsageError(f"expected a result of the same experiment in {options.out} and {options.folder}, got none")
    table, far = Table("experiment", "cells", "largest difference", "allowed", "", "where"), []
    for name, (first, again) in found.items():
        if first is None or again is None:
            folder = options.folder if first is None else options.out
            table.add_row(name, "", "", "", "not compared", f"only in {folder}" if first or again else "in neither")
            continue
        every = gaps(name, first, again)
        table.add_row(name, str(len(first["cells"].keys() | again["cells"].keys())), *_summary(every))
        far += _lines(name, [gap for gap in every if not gap.within])
    console = Console(width=console_width(), highlight=False)
    console.print(table)
    for line in far:
        console.print(line, markup=False)
    return int(bool(far))


def _summary(every: Sequence[Gap]) -> tuple[str, str, str, str]:
    """The difference that is most of what is allowed, that, the verdict, and where it is."""
    worst = max(every, key=lambda gap: gap.part, default=Gap("", 0.0, 0.0))
    verdict = "within" if all(gap.within for gap in every) else "apart"
    return f"{worst.difference:.2g}", f"{worst.allowed:.2g}", verdict, worst.what if worst.difference else "equal"


def _lines(name: str, far: Sequence[Gap]) -> list[str]:
    """What lies apart, as far as anybody reads on."""
    lines = [f"{name}: {gap}" for gap in far[:SHOWN]]
    return [*lines, f"{name}: and {len(far) - SHOWN} more"] if len(far) > SHOWN else lines
