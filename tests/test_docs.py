"""What the pages show is what there is: pictures, numbers of the README, names of tests, links."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NAMED = re.compile(r"tests/(\w+)\.py::(\w+)(?:::(\w+))?")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def figures(name: str) -> ModuleType:
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    specification = importlib.util.spec_from_file_location(name, DOCS / "figures" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


class TestPictures:
    @pytest.mark.parametrize("name", ["response", "sizes"])
    def test_those_of_the_idea_have_the_numbers_that_are_computed(self, name: str, tmp_path: Path) -> None:
        idea = figures("idea")
        idea.main(tmp_path)
        shown = texts(idea.FOLDER / f"{name}.svg")
        assert len(shown) > 8
        assert shown == texts(tmp_path / f"{name}.svg")

    def test_a_circle_of_n_is_no_bound_and_the_half_phase_hits_the_norm(self) -> None:
        found = figures("idea").bounds()
        assert found["a circle of N"] < 0.98 * found["norm"]
        assert found["norm"] < 0.99 * found["N + 2p (2021)"] < 0.99 * found["N + p, phase 0"]
        assert found["N + p, phase ½"] == pytest.approx(found["norm"], rel=1e-9)

    def test_the_norm_depends_on_size_and_stride_and_the_reshaped_kernel_does_not(self) -> None:
        idea = figures("idea")
        one, two, three = (idea.norms(stride) for stride in (1, 2, 3))
        assert all(a < b for a, b in pairwise(one))
        assert all(c <= b < a < 9 for a, b, c in zip(one, two, three, strict=True))
        assert idea.reshaped(1) == pytest.approx(3) and idea.reshaped(16) == pytest.approx(12)

    def test_that_of_the_readme_is_drawn_from_the_result(self, tmp_path: Path) -> None:
        mobilenet = figures("mobilenet")
        mobilenet.main(tmp_path / "again.svg")
        points = [re.findall(r'<use xlink:href="#\w+" x="(\S+)" y="(\S+)"', file.read_text()) for file in
                  (mobilenet.FILE, tmp_path / "again.svg")]  # fmt: skip
        assert len(points[0]) > 3 * 17
        assert points[0] == points[1]
        assert texts(mobilenet.FILE) == texts(tmp_path / "again.svg")

    def test_that_of_cifar10_is_drawn_from_the_results(self, tmp_path: Path) -> None:
        cifar10 = figures("cifar10")
        cifar10.main(tmp_path / "again.svg")
        both = cifar10.FILE, tmp_path / "again.svg"
        paths = [re.findall(r'<path d="(M [^"]+)"', file.read_text()) for file in both]
        assert len(paths[0]) > 2 * 4
        assert paths[0] == paths[1]
        assert texts(cifar10.FILE) == texts(tmp_path / "again.svg")


class TestReadme:
    def test_its_table_has_the_numbers_of_the_result(self) -> None:
        result = json.loads((ROOT / "results" / "norms_mobilenet_v2.json").read_text())
        rows = {
            "the paper's bound, as published": ("Runkel2021", "Runkel2021"),
            "`FourierBound()`, one call": ("FourierBound", "FourierBound, one call"),
            "`auto`, layer by layer": ("auto", "auto, layer by layer"),
        }
        for label, (method, timed) in rows.items():
            means = [f"{100 * result['overestimation'][s][method]['mean']:.2f} %" for s in ("stride 1", "stride 2")]
            row = [label, *means, f"{result['time'][timed]['ratio']['median']:.2f}"]
            line = f"| {' | '.join(row)} |"
            assert line in (ROOT / "README.md").read_text(), f"expected {line}; run docs/figures/mobilenet.py too"

    def test_its_hardware_is_that_of_the_result(self) -> None:
        environment = json.loads((ROOT / "results" / "norms_mobilenet_v2.json").read_text())["environment"]
        assert environment["cores"] == 2 and environment["gpu"] is None
        assert (
            f"{environment['processor']}, no GPU, torch {environment['torch'][:4]}" in (ROOT / "README.md").read_text()
        )

    def test_its_nouns_are_those_of_the_package(self) -> None:
        import opnorm

        nouns = re.findall(r"^\* `(\w+)`:", (ROOT / "README.md").read_text(), re.MULTILINE)
        assert nouns == ["ConvGeometry", "ConvOperator", "NormBound", "Normalizer", "Certificate"]
        assert {*nouns} <= {*opnorm.__all__}


@cache
def defined_in(name: str) -> set[tuple[str, ...]]:
    """The tests of a file: (function,) or (class, method), and the classes."""
    tree = ast.parse((ROOT / "tests" / f"{name}.py").read_text())
    found: set[tuple[str, ...]] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add((node.name,))
        elif isinstance(node, ast.ClassDef):
            found |= {(node.name, method.name) for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_every_test_that_a_page_names_exists() -> None:
    named = [(page, *match) for page in PAGES for match in NAMED.findall(page.read_text())]
    assert len(named) > 30
    for page, file, *path in named:
        assert (ROOT / "tests" / f"{file}.py").is_file(), f"{page}: {file}"
        assert tuple(filter(None, path)) in defined_in(file), f"{page}: {file}::{'::'.join(path)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_links_to_or_names_exists(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(text):
        if not re.match(r"https?:", link):
            assert (page.parent / link).exists(), link
    for example in re.findall(r"`(examples/[\w.]+)", text):
        assert (ROOT / example).is_file(), example
