"""What holds for the package as a whole: what it imports, how fast, what it ships, and that its files agree."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import opnorm

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "opnorm"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [path for path in sorted(SOURCE.rglob("*.py")) if "lab" not in path.relative_to(SOURCE).parts]


def in_new_process(code: str) -> Any:
    """What `code` prints, as JSON, in an interpreter that knows nothing of this one."""
    environment = {"PYTHONPATH": str(SOURCE.parent), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def dotted(path: Path) -> str:
    """The name under which a file of the package is imported."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """The dotted names that a file imports, anywhere in it."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1]] if node.level else [])
            module = ".".join(filter(None, [base, node.module]))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


class TestImport:
    def test_core_imports_neither_lab_nor_an_extra(self) -> None:
        """What all of the core's modules import is the standard library's, torch's or our own."""
        modules = [dotted(path) for path in CORE if path.name != "__main__.py"]
        code = (
            f"import sys, json, torch; before = set(sys.modules); import {', '.join(modules)}\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
        new = in_new_process(code)
        assert set(modules) <= set(new)
        assert not [name for name in new if name.startswith("opnorm.lab")]
        assert {name.partition(".")[0] for name in new} - sys.stdlib_module_names <= {"opnorm", "torch"}

    def test_import_takes_under_a_tenth_of_the_time_of_torch(self) -> None:
        """Of the processor, and beside torch, so that it is the same on a machine that is slow or at something else."""
        code = (
            "import time, json; start = time.process_time(); import torch; after = time.process_time(); import opnorm\n"
            "print(json.dumps((time.process_time() - after) / (after - start)))"
        )
        assert any(in_new_process(code) < 0.1 for _ in range(3))  # the first may have to compile ours, and torch not

    @pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SOURCE)))
    def test_only_main_imports_lab(self, path: Path) -> None:
        if path != SOURCE / "__main__.py":
            assert not any(name.startswith("opnorm.lab") for name in imported_modules(path))

    def test_the_check_of_imports_sees_every_way_to_import(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "opnorm")
        file = tmp_path / "opnorm" / "norms" / "x.py"
        file.parent.mkdir(parents=True)
        for line in (
            "import opnorm.lab",
            "from opnorm import lab",
            "from ..lab import cli",
            "def f():\n  from .. import lab",
        ):
            file.write_text(line)
            assert any(name.startswith("opnorm.lab") for name in imported_modules(file)), line

    def test_all_names_what_exists(self) -> None:
        assert sorted(opnorm.__all__, key=str.casefold) == sorted(set(opnorm.__all__), key=str.casefold)
        for name in opnorm.__all__:
            assert getattr(opnorm, name) is not None


class TestMetadata:
    def test_torch_is_the_only_dependency(self) -> None:
        assert [re.split("[<>=]", entry)[0] for entry in PYPROJECT["dependencies"]] == ["torch"]

    def test_version_is_that_of_the_installed_package(self) -> None:
        try:
            installed = importlib.metadata.version("opnorm")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("opnorm is not installed here, only on the path; `make test` installs it")
        assert opnorm.__version__ == installed

    def test_changelog_has_the_version(self) -> None:
        headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert headings[0] == opnorm.__version__

    def test_citation_is_complete(self) -> None:
        citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
        assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
        assert citation["version"] == opnorm.__version__
        assert "Depthwise Separable Convolutions" in citation["references"][0]["title"]

    def test_licence_and_type_marker_are_shipped(self) -> None:
        assert "Apache License" in (ROOT / "LICENSE").read_text()
        assert (SOURCE / "py.typed").is_file()

    def test_oldest_constraints_are_the_lower_bounds_of_torch_and_lab(self) -> None:
        bounds = [*PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"]["lab"]]
        oldest = dict(line.split("==") for line in (ROOT / "constraints-oldest.txt").read_text().split())
        for entry in bounds:
            name, bound = entry.split(">=")
            assert [*map(int, oldest[name].split("."))][: bound.count(".") + 1] == [*map(int, bound.split("."))], name
        assert len(oldest) == len(bounds)


class TestDocs:
    def test_pages_build_without_a_warning(self, tmp_path: Path) -> None:
        pytest.importorskip("mkdocs", reason="the extra docs is not installed")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        pages = [*(tmp_path / "site").rglob("*.html")]
        assert pages
        for page in pages:  # whatever a browser would fetch from elsewhere; links that a reader follows are fine
            fetched = re.findall(
                r"<(?:script|img|link rel=.stylesheet.)[^>]*(?:src|href)=.https?:[^>]*", page.read_text()
            )
            assert not fetched
