"""`page`, and a certificate as one, and as a figure: pure functions of numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from opnorm.certify import Certificate

SHELL = files("opnorm").joinpath("page.html")
CERTIFICATE = files("opnorm").joinpath("certificate.html")


def certificate_page(certificate: Mapping[str, Any]) -> str:
    """One HTML file with everything in it, from `Certificate.to_dict()`."""
    size = "×".join("any" if n is None else str(n) for n in certificate["input_shape"])
    title = f"{certificate['model']}: Lipschitz bound {certificate['bound']:.4g}"
    return page(title, f"{certificate['model']} on {size}", certificate, [(CERTIFICATE, "data")])


def page(title: str, heading: str, data: Mapping[str, Any], parts: Iterable[tuple[Traversable, str]]) -> str:
    """One self-contained HTML file that shows `data`: nothing is loaded from anywhere.

    The numbers travel as JSON inside the page. `<` is escaped there, so that no layer name can end the script element.

    Args:
        title, heading: plain text.
        data: of plain numbers and strings.
        parts: files of a style, sections and a script that fills them, each with what its script gets as `data`:
            `"data"`, or a part of that.
    """
    filled = {"style": "", "sections": "", "script": ""}
    for file, argument in parts:
        text = file.read_text(encoding="utf-8")
        found = dict(re.findall(r"<(style|script)>\n(.*?)</\1>\n", text, re.DOTALL))
        filled["style"] += found["style"]
        filled["sections"] += re.sub(r"<(style|script)>.*?</\1>\n", "", text, flags=re.DOTALL)
        filled["script"] += f"(data => {{\n{found['script']}}})({argument});\n"
    numbers = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    numbers = numbers.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    filled |= {"title": escape(title), "heading": escape(heading), "data": numbers}
    template = SHELL.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: filled[name[1]], template)


def certificate_figure(certificate: Certificate, axes: Any = None) -> Any:
    """The bound after every operation, on a log scale; returns the figure."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('plotting needs matplotlib: pip install "opnorm[lab]"', name="matplotlib") from error

    rows = [row for row in certificate.layers if row.total > 0]
    if axes is None:
        _, axes = plt.subplots(figsize=(8, max(2.0, 0.22 * len(rows) + 1)), layout="constrained")
    before = 1.0
    for i, row in enumerate(rows):
        axes.barh(
            i,
            abs(row.total - before),
            left=min(row.total, before),
            color="#2a78d6" if row.total >= before else "#1baf7a",
        )
        before = row.total
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("bound of the Lipschitz constant, up to this layer")
    axes.set_title(f"{certificate.model}: {certificate.bound:.4g}")
    return axes.figure
