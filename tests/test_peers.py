"""`opnorm bench peers`: which layers, what is measured of whom, and the page and figures that follow from the files."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm import ConvOperator, FourierBound, Method
from opnorm.lab import bench
from opnorm.lab.bench import peers, peers_page
from opnorm.lab.bench.contenders import CONTENDERS, REFERENCE, Contender, Refused, Trial, is_below
from opnorm.lab.bench.layers import CELLS, KINDS, depthwise, gaussian, operators
from opnorm.lab.bench.peers import measure
from opnorm.lab.bench.peers_page import BEGIN, END, figure_name, kinds, measured, ratio_text, read_cells, sentences
from opnorm.lab.cli import run
from opnorm.norms import baselines

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "results" / "peers"


def answering(value: Callable[[ConvOperator], Any], family: Any = "package") -> Contender:
    """A contender that says the same whenever it is asked."""
    return Contender(family, lambda operator: Trial(lambda: value(operator)))


def refusing(operator: ConvOperator) -> Trial:
    raise Refused("too wide")


def exact(operator: ConvOperator) -> float:
    return float(torch.linalg.matrix_norm(operator.to_dense().double(), 2))


def broken(operator: ConvOperator) -> float:
    raise RuntimeError("no such thing\nat all")


FEW = {
    REFERENCE: Contender("ours", CONTENDERS[REFERENCE].prepare),
    "double": answering(lambda operator: 2 * exact(operator), "published"),
    "half": answering(lambda operator: exact(operator) / 2),
    "divides": answering(lambda operator: operator.weight / (4 * exact(operator))),
    "refuses": Contender("package", refusing),
    "fails": answering(broken),
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six contenders in place of all, on two small layers, and no processes."""
    cells = {"small_s1": ("Small", depthwise(3, 3, 7, 1)), "small_s2": ("Small", depthwise(3, 3, 7, 2))}
    monkeypatch.setattr(peers, "CONTENDERS", FEW)
    monkeypatch.setattr(peers_page, "CONTENDERS", FEW)
    monkeypatch.setattr(peers, "CELLS", cells)
    monkeypatch.setattr(peers_page, "CELLS", cells)
    monkeypatch.setattr(peers, "operators", lambda weights, seed: {k: gaussian(g, seed) for k, (_, g) in cells.items()})
    monkeypatch.setattr(peers, "_peaks", lambda operator, names: dict.fromkeys(names, 2**20))


class TestLayers:
    def test_every_kind_of_the_benchmark_has_both_strides(self) -> None:
        found = operators(None, 0)
        assert found.keys() == CELLS.keys()
        classes = {
            "MobileNetV2": ("depthwise", (3, 3)), "EfficientNet": ("depthwise", (5, 5)),
            "ConvNeXt": ("depthwise", (7, 7)), "ResNet": ("dense", (3, 3)), "3-D, depth": ("depthwise", (3, 3, 3)),
            "3-D, dense": ("dense", (3, 3, 3)),
        }  # fmt: skip
        for name, (kind, kernel) in classes.items():
            (cells,) = (cells for title, cells in KINDS.items() if title.startswith(name))
            layers = [found[cell].geometry for cell in cells]
            assert {layer.stride[0] for layer in layers} == {1, 2}, name
            assert {(layer.kind, layer.kernel_size) for layer in layers} == {(kind, kernel)}, name

    def test_a_name_says_stride_and_size(self) -> None:
        for cell, operator in operators(None, 0).items():
            *_, size, stride = cell.split("_")
            geometry = operator.geometry
            assert stride == f"s{geometry.stride[0]}"
            assert geometry.kind == "pointwise" or int(size) == geometry.input_size[0]

    def test_no_published_method_is_left_out(self) -> None:
        published = {cls for cls in vars(baselines).values() if isinstance(cls, type) and issubclass(cls, Method)}
        named = {getattr(baselines, name.partition(",")[0], None) for name in CONTENDERS}
        assert len(published) > 10 and published <= named

    @pytest.mark.parametrize("command", ["norms", "memory"])
    def test_narrower_benchmarks_name_it(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("opnorm", lambda: bench.main([command, "--help"])) == 0
        assert "opnorm bench peers" in capsys.readouterr().out

    def test_who_is_compared(self) -> None:
        families = {name: contender.family for name, contender in CONTENDERS.items()}
        assert families[REFERENCE] == "ours"
        for package in ("torch spectral_norm", "deel-torchlip", "orthogonium AOL", "normflows"):
            assert families[package] == "package"


class TestMeasure:
    def test_values_are_over_the_norm(self, few: None) -> None:
        operator = gaussian(depthwise(3, 3, 7, 1), 0)
        found = measure(operator, rounds=3)
        rows = found["methods"]
        assert found["norm"] == pytest.approx(exact(operator), rel=1e-6)
        assert rows[REFERENCE]["ratio"] == pytest.approx(float(FourierBound().compute(operator)) / exact(operator), 0.1)
        assert [rows[name]["ratio"] for name in ("double", "half", "divides")] == pytest.approx([2, 0.5, 4], rel=1e-4)
        assert rows["refuses"] == {"family": "package", "refused": "too wide"}
        assert rows["fails"] == {"family": "package", "error": "RuntimeError: no such thing"}
        assert rows["double"]["of_auto"]["median"] > 0 and rows["double"]["rounds"] == 3

    def test_a_file_a_layer_and_none_twice(self, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def counted(operator: ConvOperator, rounds: int, what: str) -> dict[str, Any]:
            seen.append(what)
            if len(seen) == 2:
                raise KeyboardInterrupt
            return measure(operator, rounds, what)

        seen: list[str] = []
        monkeypatch.setattr(peers, "measure", counted)
        argv = ["--out", str(tmp_path), "--rounds", "2"]
        with pytest.raises(KeyboardInterrupt):
            peers.main(argv)
        assert peers.main(argv) == peers.main(argv) == 0
        assert seen == ["small_s1", "small_s2", "small_s2"]
        assert {file.name for file in tmp_path.iterdir()} == {"small_s1.json", "small_s2.json"}

    @pytest.mark.slow
    def test_a_real_layer_with_everyone(self, tmp_path: Path) -> None:
        pytest.importorskip("orthogonium", reason="the extra bench is not installed")
        assert peers.main(["--out", str(tmp_path), "--rounds", "2", "--only", "resnet_pointwise"]) == 0
        (file,) = tmp_path.iterdir()
        content = json.loads(file.read_text())
        assert content["methods"].keys() == CONTENDERS.keys()
        assert not is_below(content["methods"]["Exact"]["ratio"])
        assert all("peak_bytes" in row for row in content["methods"].values() if "ratio" in row)


@pytest.fixture
def written(few: None, tmp_path: Path) -> Path:
    """A page that has been written from results."""
    page = tmp_path / "docs" / "comparison.md"
    page.parent.mkdir()
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n")
    out = ["--out", str(tmp_path / "results")]
    assert peers.main([*out, "--rounds", "2"]) == 0
    assert peers.main([*out, "--page", str(page)]) == 0
    return page


class TestPage:
    def test_it_stands_between_its_marks_with_its_figures(self, written: Path) -> None:
        text = written.read_text()
        assert text.startswith(f"# Before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
        cells = read_cells(written.parent.parent / "results")
        (kind,) = kinds(cells)
        assert measured(cells) in text
        figure = written.parent / figure_name(kind)
        assert f"({figure_name(kind)})" in text and xml.etree.ElementTree.parse(figure).getroot().tag.endswith("svg")

    def test_again_it_is_the_same(self, written: Path) -> None:
        before = {file: file.read_bytes() for file in written.parent.rglob("*.*")}
        assert peers.main(["--out", str(written.parent.parent / "results"), "--page", str(written)]) == 0
        assert {file: file.read_bytes() for file in written.parent.rglob("*.*")} == before

    def test_what_is_no_bound_is_bold_and_named(self, written: Path) -> None:
        text = written.read_text()
        assert "| half | **0.500** |" in text and "| double | 2.000 |" in text
        assert "| fails | error in 2 of 2 |" in text and "| refuses | no |" in text
        for cell in read_cells(written.parent.parent / "results"):
            (sentence,) = sentences(cell)
            assert "Below the norm: half (0.500)" in sentence

    def test_who_is_faster_or_tighter_is_said(self, written: Path) -> None:
        (cell, _) = read_cells(written.parent.parent / "results")
        cell["methods"]["double"] |= {"of_auto": {"median": 0.5}, "ratio": 2.0}
        cell["methods"][REFERENCE]["ratio"] = 2.5
        (sentence,) = sentences(cell)
        assert "Not below the norm and faster: double (2.000) in 0.5 of the time" in sentence
        assert "Not below the norm and tighter: double (2.000)" in sentence

    def test_a_value_below_the_norm_is_never_shown_as_one(self) -> None:
        assert ratio_text(0.999999 - 1e-6) == "0.999998" and ratio_text(1.0) == "1.000" and ratio_text(1e5) == "1e+05"

    def test_what_is_missing_is_one_line(self, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "page.md"
        page.write_text("no marks\n")
        out = ["--out", str(tmp_path / "results")]
        assert run("opnorm", lambda: peers.main([*out, "--page", str(page)])) == 2
        assert "got none for small_s1, small_s2" in capsys.readouterr().err
        assert peers.main([*out, "--rounds", "2"]) == 0
        assert run("opnorm", lambda: peers.main([*out, "--page", str(page)])) == 2
        assert "got no such marks" in capsys.readouterr().err


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="not measured yet")
class TestCommitted:
    def test_the_page_is_what_the_results_give(self) -> None:
        cells = read_cells(COMMITTED)
        page = ROOT / "docs" / "comparison.md"
        assert measured(cells) in page.read_text(encoding="utf-8")
        assert all((page.parent / figure_name(kind)).is_file() for kind in kinds(cells))

    def test_no_value_of_ours_is_below_the_norm(self) -> None:
        for cell in read_cells(COMMITTED):
            ours = {name: row for name, row in cell["methods"].items() if row["family"] == "ours" and "ratio" in row}
            assert REFERENCE in ours
            assert not any(is_below(float(row["ratio"])) for row in ours.values()), cell["layer"]
