"""Code blocks of a Markdown page: found, and run as a reader would run them.

The rules, which tests/test_snippets.py applies to README.md and to every page under docs/:

* A `python` block is executed. The blocks of a page share one namespace, in order. In one with `>>>` prompts, each
  result that is shown is compared, as doctest does (`...` stands for anything).
* A `console` block that begins with `$ opnorm` or `$ python -m opnorm` says what is done with it, in a comment on the
  line before: `<!-- run -->` runs its commands, which must exit with 0, and compares what is shown below each, if
  anything is, with what it prints. Other `console` blocks are left alone, unless they are marked so.
* `<!-- skip: reason -->` leaves a block of either kind out: for what cannot run here, such as a launch on many GPUs.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"(?:^[ \t]*<!--[ ]*(?P<note>run|skip:[^>]*?)[ ]*-->[ \t]*\n(?:[ \t]*\n)?)?"
    r"^(?P<indent>[ \t]*)(?P<fence>```+)[ ]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
OURS = re.compile(r"\$ (?:python3? -m )?opnorm\b")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(test: doctest.DocTest) -> None:
    """Run examples with prompts; raise what they raise, or a `DocTestFailure` where a result is not the one shown."""
    try:
        doctest.DebugRunner(optionflags=OPTIONS).run(test, clear_globs=False)
    except doctest.UnexpectedException as unexpected:  # which says nothing but the name of the test
        raise unexpected.exc_info[1].with_traceback(unexpected.exc_info[2]) from None


@dataclass(frozen=True)
class Block:
    """One fenced block: where its first line of code stands, what it holds, and what the comment before it says."""

    page: Path
    line: int
    language: str
    code: str
    note: str

    @property
    def kind(self) -> str:
        """What is done with it: `"python"`, `"doctest"`, `"console"`, or `""` for nothing."""
        if self.language in ("python", "py", "pycon"):
            return "doctest" if re.search(r"^>>> ", self.code, re.MULTILINE) else "python"
        return "console" if OURS.match(self.code) or self.note == "run" else ""

    def run(self, namespace: dict[str, Any], folder: Path) -> None:
        """Execute it in `namespace` or, if it is a console's, in `folder`; raise where it fails."""
        if not self.kind or self.note.startswith("skip:"):
            return
        if self.kind == "console":
            self._run_commands(folder)
        elif self.kind == "doctest":
            self._run_examples(namespace)
        else:  # as many empty lines before it as the page has lines, so that a traceback shows the page's line
            exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)

    def _run_examples(self, namespace: dict[str, Any]) -> None:
        parser = doctest.DocTestParser()
        test = parser.get_doctest(self.code, {}, self.page.name, str(self.page), self.line - 1)
        test.globs = namespace  # the page's own, and kept for its next block
        run_examples(test)

    def _run_commands(self, folder: Path) -> None:
        if self.note != "run":
            raise AssertionError(
                f"{self.page}:{self.line}: write <!-- run --> or <!-- skip: reason --> above the block"
            )
        for session in re.split(r"^\$ ", self.code, flags=re.MULTILINE)[1:]:
            command, _, shown = re.sub(r"\\\n\s*", "", session).partition("\n")
            printed = self._run_command(command, folder)
            if shown.strip() and not doctest.OutputChecker().check_output(shown, printed, OPTIONS):
                raise AssertionError(
                    f"{self.page}:{self.line}: {command} printed\n{printed}\nbut the page shows\n{shown}"
                )

    def _run_command(self, command: str, folder: Path) -> str:
        words = shlex.split(command, comments=True)
        if words[0] == "opnorm":
            words = [sys.executable, "-m", *words]
        elif words[0] in ("python", "python3"):
            words[0] = sys.executable
        source = str(Path(__file__).parents[1] / "src")
        environment = os.environ | {"PYTHONPATH": source, "COLUMNS": "120", "NO_COLOR": "1"}
        run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise AssertionError(f"{self.page}:{self.line}: {command} exited with {run.returncode}:\n{run.stderr}")
        return run.stdout


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, also those that are indented inside a list or an admonition."""
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("code")) + 1,
            language=match["language"],
            code=textwrap.dedent(match["code"]),
            note=match["note"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def run_page(page: Path, folder: Path) -> int:
    """Run the blocks of a page in order, in one namespace; how many there were to run."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for block in blocks_of(page) if block.kind]
    for block in blocks:
        block.run(namespace, folder)
    return len(blocks)
