"""`opnorm reproduce figures`: draws every figure, and writes its section of docs/results.md, from the results alone.

`reproduce` is what the experiments have in common: read the options, compute, draw.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro

from opnorm.lab.checkpoint import write_bytes
from opnorm.lab.cli import UsageError, parse
from opnorm.lab.paper.cells import Result, forget_part, read_result, result_path
from opnorm.lab.paper.figures import FIGURES
from opnorm.lab.paper.options import Profiles, Some, read_options
from opnorm.lab.paper.sections import SECTIONS
from opnorm.lab.record import write_text

PAGE, IMAGES = "results.md", Path("img", "results")


@dataclass(frozen=True)
class Figures:
    """Draw the figures of the results that are there, and write their sections of the page, again.

    For example:
      opnorm reproduce figures
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("results")
    """Where the results are."""

    docs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("docs")
    """A folder with the page results.md; without it the figures are drawn beside the results."""


def main(argv: Sequence[str]) -> int:
    """Run `opnorm reproduce figures`."""
    options = parse(Figures, argv, "opnorm reproduce figures")
    if not draw(options.out, options.docs, FIGURES):
        raise UsageError(f"expected results in {options.out}, such as tightness.json, got none")
    return 0


def reproduce(
    what: str,
    kind: type[Some],
    profiles: Profiles,
    argv: Sequence[str],
    run: Callable[[Some, Sequence[str]], Result | int],
    show: Callable[[Result], None] | None = None,
) -> int:
    """Run an experiment, draw its figure and print what it found; the exit code.

    Args:
        what: its name.
        kind: its options.
        profiles: what these are in each profile.
        argv: its arguments.
        run: its result from the options and the arguments of `opnorm`; where there is none, the exit code.
        show: how the result is printed.
    """
    options = read_options(kind, argv, f"opnorm reproduce {what}", profiles)
    result = run(options, ["reproduce", what, *argv])
    if isinstance(result, int):
        return result
    forget_part(options.out, what)
    draw(options.out, options.docs, [what])
    if show is not None:
        show(result)
    return 0


def draw(out: Path, docs: Path, names: Iterable[str]) -> list[Path]:
    """Draw the figure of each result that is there, and write its section; what was written."""
    written = []
    page = docs / PAGE
    for name in names:
        result = read_result(out, name)
        if result is None:
            continue
        figure = (docs / IMAGES if page.is_file() else out) / f"{name}.svg"
        figure.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(figure, svg(name, result, digest(result_path(out, name))))
        written.append(figure)
        if page.is_file():
            text = page.read_text(encoding="utf-8")
            write_text(page, with_section(text, name, SECTIONS[name](result)))
            written.append(page)
    for path in dict.fromkeys(written):
        print(f"written: {path}")
    return written


def with_section(page: str, name: str, section: str) -> str:
    """The page with this section between its two marks; at its end, where it had none."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{section.strip()}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}\n"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, page, count=1, flags=re.DOTALL)


def svg(name: str, result: Result, source: str) -> bytes:
    """The figure as SVG, the same bytes for the same result; it names the digest of what it was drawn from."""
    buffer = io.BytesIO()
    style: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "savefig.facecolor": "white"}
    with matplotlib.rc_context(style):
        FIGURES[name](result).savefig(buffer, format="svg", metadata={"Date": None, "Source": source})
    return buffer.getvalue()


def digest(path: Path) -> str:
    """By which a figure says which file it was drawn from."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
