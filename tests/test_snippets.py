"""Every snippet in README and docs runs, and so does every example in a docstring."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import opnorm
from snippets import blocks_of, run_examples, run_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [name for _, name, _ in pkgutil.walk_packages(opnorm.__path__, "opnorm.") if not name.endswith("__main__")]


@pytest.fixture(autouse=True)
def rules_of_examples() -> Iterator[None]:
    """Rules that an example registers are gone before the next one, which may register the same."""
    before = set(opnorm.rules.known())
    yield
    for operation in set(opnorm.rules.known()) - before:
        opnorm.rules.forget(operation)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_snippet_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


def test_the_readme_has_snippets() -> None:
    assert any(block.kind == "python" for block in blocks_of(ROOT / "README.md"))


def import_or_skip(name: str) -> ModuleType:
    """A module; a missing extra skips where the lab needs it, and fails where the core does."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.startswith("opnorm.lab") and not str(error.name).startswith("opnorm"):
            pytest.skip(f"{name} needs {error.name}, which is not installed")
        raise


@pytest.mark.parametrize("name", ["opnorm", *MODULES])
def test_every_example_in_a_docstring_holds(name: str) -> None:
    module = import_or_skip(name)
    exported = {name: getattr(opnorm, name) for name in opnorm.__all__}
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, globs=exported | vars(module) | {"torch": torch})
    for test in tests:
        torch.manual_seed(0)
        run_examples(test)


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


class TestHarness:
    """The harness fails where a page is wrong: otherwise the tests above would hold whatever the pages say."""

    def test_blocks_share_a_namespace(self, tmp_path: Path) -> None:
        page = page_of(tmp_path, "```python\na = 1\n```\ntext\n```python\nassert a == 1\n```\n")
        assert run_page(page, tmp_path) == 2

    def test_an_error_names_the_line_of_the_page(self, tmp_path: Path) -> None:
        page = page_of(tmp_path, "# Title\n\n```python\na = 1\na / 0\n```\n")
        with pytest.raises(ZeroDivisionError) as caught:
            run_page(page, tmp_path)
        assert caught.traceback[-1].lineno + 1 == 5
        assert caught.traceback[-1].path == page

    def test_indented_blocks_and_blocks_with_titles_count(self, tmp_path: Path) -> None:
        page = page_of(tmp_path, '* item\n\n    ```python title="x"\n    if True:\n        raise KeyError\n    ```\n')
        with pytest.raises(KeyError):
            run_page(page, tmp_path)

    def test_shown_results_are_compared(self, tmp_path: Path) -> None:
        assert run_page(page_of(tmp_path, "```python\n>>> 1 + 1\n2\n```\n"), tmp_path) == 1
        with pytest.raises(doctest.DocTestFailure):
            run_page(page_of(tmp_path, "```python\n>>> 1 + 1\n3\n```\n"), tmp_path)

    def test_skipped_blocks_do_not_run(self, tmp_path: Path) -> None:
        run_page(page_of(tmp_path, "<!-- skip: needs eight GPUs -->\n```python\n1 / 0\n```\n"), tmp_path)

    def test_a_skip_has_a_reason_and_holds_for_the_next_block_alone(self, tmp_path: Path) -> None:
        block = "```python\n1 / 0\n```\n"
        for text in ("<!-- skip -->\n" + block, "<!-- skip: x -->\ntext\n" + block, "<!-- skip: x -->\n" + block * 2):
            with pytest.raises(ZeroDivisionError):
                run_page(page_of(tmp_path, text), tmp_path)

    def test_other_languages_do_not_run(self, tmp_path: Path) -> None:
        assert run_page(page_of(tmp_path, "```\n1 / 0\n```\n```console\n$ make test\n```\n"), tmp_path) == 0

    def test_commands_say_whether_they_run(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="write <!-- run --> or"):
            run_page(page_of(tmp_path, "```console\n$ opnorm norms\n```\n"), tmp_path)

    def test_a_command_that_fails_fails(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="exited with"):
            run_page(page_of(tmp_path, "<!-- run -->\n```console\n$ opnorm no-such-command\n```\n"), tmp_path)

    def test_what_a_command_prints_is_compared(self, tmp_path: Path) -> None:
        text = "<!-- run -->\n```console\n$ python -c 'print(6 * 7)'\n{}\n```\n"
        run_page(page_of(tmp_path, text.format("42")), tmp_path)
        with pytest.raises(AssertionError, match="but the page shows"):
            run_page(page_of(tmp_path, text.format("43")), tmp_path)
