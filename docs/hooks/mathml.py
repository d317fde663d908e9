"""Formulas become MathML when the pages are built, and their font is shipped: no script and no network to read them."""

import html
import importlib.util
import re
from pathlib import Path
from typing import Any

from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

# what pymdownx.arithmatex leaves of $...$ and $$...$$
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
FONT = "STIXTwoMath-Regular.ttf"  # SIL Open Font License 1.1; ziamath is a package that carries it
converter = LatexToMathML()


def on_files(files: Any, config: Any) -> Any:
    """Add the font that docs/css/opnorm.css names, since many systems have none with mathematical tables."""
    package = importlib.util.find_spec("ziamath")
    if package is None or package.origin is None:
        raise PluginError("expected the package ziamath, for its font; install opnorm[docs]")
    font = Path(package.origin).parent / "fonts" / FONT
    files.append(File.generated(config, f"css/{FONT}", abs_src_path=str(font)))
    return files


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Put MathML in the place of each formula; one that cannot be read stops the build and names its page."""

    def mathml(match: re.Match[str]) -> str:
        tag, opening, latex = match.groups()
        try:
            formula = converter.convert_with_local_state(html.unescape(latex), displaystyle=opening == "[")
        except LatexError as error:
            raise PluginError(f"{page.file.src_path}: {latex.strip()}: {error}") from None
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(mathml, content)
