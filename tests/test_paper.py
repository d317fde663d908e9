"""`opnorm reproduce`: what an experiment computes, how it goes on after a kill, and what is drawn from its result."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm import ConvGeometry, ConvOperator, Exact
from opnorm.lab import paper
from opnorm.lab.cli import UsageError, run
from opnorm.lab.paper import cells, tightness
from opnorm.lab.paper.cells import compute
from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.options import Options
from opnorm.lab.paper.page import digest, draw, svg, with_section
from opnorm.lab.paper.tightness import Tightness
from opnorm.lab.paper.truth import enclosed_norms, one_channel_each

GEOMETRIES = [
    ConvGeometry(5, 5, 3, (7, 11), padding=1, groups=5),  # eigenvalues
    ConvGeometry(3, 3, 3, (19, 23), padding=1, groups=3),
    ConvGeometry(3, 3, (5, 3), (23, 19), padding=(2, 1), groups=3),
    ConvGeometry(3, 3, 3, (37, 41), padding=1, stride=2, groups=3),
    ConvGeometry(3, 3, (3, 2), (37, 41), padding=((1, 0), (0, 1)), stride=(1, 2), dilation=(2, 1), groups=3),
    ConvGeometry(2, 2, 3, (7, 8, 9), padding=1, groups=2),
    ConvGeometry(2, 2, 7, (353,), padding=3, groups=2),
]


@dataclass(frozen=True)
class Counting(Options):
    """An experiment for tests."""

    numbers: tuple[int, ...] = (1, 2, 3)


PROFILES: dict[str, dict[str, Any]] = {"small": {}, "paper": {"numbers": (1, 2, 3, 4)}}


class Killed(BaseException):
    """What a kill looks like from inside."""


def count(options: Counting, seen: list[int], stop_at: int | None = None) -> dict[str, Any]:
    """Compute n² a cell, and be killed in one of them."""

    def cell(n: int) -> dict[str, int]:
        if n == stop_at:
            raise Killed
        seen.append(n)
        return {"square": n * n}

    plan = {f"n = {n}": (lambda n=n: cell(n)) for n in options.numbers}
    return compute("counting", options, ["reproduce", "counting"], plan, profiles=PROFILES, seed=5)


class TestTruth:
    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    def test_each_channel_lies_between_its_two_sides(self, geometry: ConvGeometry, device: torch.device) -> None:
        weight = torch.randn(geometry.weight_shape, dtype=torch.float64, device=device)
        found = enclosed_norms(ConvOperator(geometry, weight), rtol=1e-6)
        single = replace(geometry, in_channels=1, out_channels=1, groups=1)
        norms = torch.stack([Exact(rtol=1e-11).compute(ConvOperator(single, kernel[None])).value for kernel in weight])
        assert (found.lower <= norms * (1 + 1e-10)).all()
        assert (norms <= found.upper * (1 + 1e-10)).all()
        assert (found.upper <= found.lower * (1 + 1.01e-6)).all()

    def test_a_value_that_is_too_small_is_not_proved(self) -> None:
        from opnorm.lab.paper.truth import _is_above

        geometry = ConvGeometry(1, 1, 3, (23, 19), padding=1)
        kernel = torch.randn(1, 1, 3, 3, dtype=torch.float64)
        norm = Exact(rtol=1e-12).compute(ConvOperator(geometry, kernel)).value
        both = torch.cat([kernel, kernel])
        shifts = torch.stack([norm * (1 - 1e-8), norm * (1 + 1e-8)]).square()
        assert _is_above(both, geometry.axes, shifts).tolist() == [False, True]

    def test_channels_do_not_depend_on_each_other(self) -> None:
        geometry = ConvGeometry(1, 1, 3, (17, 19), padding=1)
        kernels = torch.randn(4, 1, 3, 3, dtype=torch.float64)
        together = enclosed_norms(one_channel_each(geometry, kernels), rtol=1e-8)
        alone = [enclosed_norms(one_channel_each(geometry, kernel[None]), rtol=1e-8).lower for kernel in kernels]
        torch.testing.assert_close(together.lower, torch.cat(alone), rtol=1e-7, atol=0)

    def test_scale_does_not_matter(self) -> None:
        geometry = ConvGeometry(2, 2, 3, (17, 19), padding=1, groups=2)
        weight = torch.randn(geometry.weight_shape, dtype=torch.float64)
        for scale in (1e-10, 1e10):
            found = enclosed_norms(ConvOperator(geometry, scale * weight)).lower / scale
            torch.testing.assert_close(found, enclosed_norms(ConvOperator(geometry, weight)).lower, rtol=1e-6, atol=0)

    def test_what_has_no_norm_of_a_channel_is_refused(self) -> None:
        dense = ConvGeometry(2, 2, 3, (7, 7), padding=1)
        with pytest.raises(ValueError, match="depthwise"):
            enclosed_norms(ConvOperator(dense, torch.randn(dense.weight_shape)))
        layer = ConvGeometry(2, 2, 3, (19, 19), padding=1, groups=2)
        for value in (math.nan, 0.0):
            with pytest.raises(ValueError, match="finite kernels that are not zero"):
                enclosed_norms(ConvOperator(layer, torch.full(layer.weight_shape, value)))


class TestCells:
    def test_a_kill_loses_one_cell(self, tmp_path: Path) -> None:
        seen: list[int] = []
        options = Counting(out=tmp_path)
        with pytest.raises(Killed):
            count(options, seen, stop_at=3)
        assert not (tmp_path / "counting.json").exists()  # what is there is whole
        result = count(options, seen)
        assert seen == [1, 2, 3]
        assert result == json.loads((tmp_path / "counting.json").read_text())
        assert [cell["square"] for cell in result["cells"].values()] == [1, 4, 9]
        assert result["environment"]["command"] == "opnorm reproduce counting"
        assert "resumed" not in result

    def test_restart_forgets(self, tmp_path: Path) -> None:
        seen: list[int] = []
        with pytest.raises(Killed):
            count(Counting(out=tmp_path), seen, stop_at=3)
        count(Counting(out=tmp_path, restart=True), seen)
        assert seen == [1, 2, 1, 2, 3]

    def test_an_older_result_stays_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        count(Counting(out=tmp_path), [])
        cells.forget_part(tmp_path, "counting")
        before = (tmp_path / "counting.json").read_bytes()
        with pytest.raises(Killed):
            count(Counting(out=tmp_path, numbers=(7, 8)), [], stop_at=8)
        assert (tmp_path / "counting.json").read_bytes() == before
        count(Counting(out=tmp_path, numbers=(7, 8)), [])
        assert list(json.loads((tmp_path / "counting.json").read_text())["cells"]) == ["n = 7", "n = 8"]

    @pytest.mark.parametrize("other", [{"numbers": (1, 2)}, {"profile": "paper"}])
    def test_the_rest_of_another_run_is_refused(self, other: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(Killed):
            count(Counting(out=tmp_path), [], stop_at=2)
        with pytest.raises(UsageError, match="opnorm reproduce counting, or begin again with --restart"):
            count(replace(Counting(out=tmp_path), **other), [])

    def test_it_says_where_it_was_gone_on_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Killed):
            count(Counting(out=tmp_path), [], stop_at=2)
        environment = cells.environment
        monkeypatch.setattr(cells, "environment", lambda *a: environment(*a) | {"commit": "another"})
        for stop_at in (3, None):
            try:
                result = count(Counting(out=tmp_path), [], stop_at=stop_at)
            except Killed:
                continue
        assert result["environment"]["commit"] != "another"
        assert [e["commit"] for e in result["resumed"]] == ["another"]

    def test_it_says_how_it_differs_from_its_profile(self, tmp_path: Path) -> None:
        assert count(Counting(out=tmp_path), [])["changes"] == []
        changed = count(Counting(out=tmp_path, numbers=(2,), restart=True), [])
        assert (changed["profile"], changed["changes"], changed["settings"]) == ("small", ["numbers"], {"numbers": [2]})

    def test_a_file_that_is_no_json_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "counting.part.json").write_text("{")
        with pytest.raises(UsageError, match=r"counting\.part\.json.*--restart"):
            count(Counting(out=tmp_path), [])


class TestCommand:
    def test_without_words_it_lists_what_there_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert paper.main([]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in paper.EXPERIMENTS)

    def test_wrong_words_are_one_line(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for argv in (["tight"], ["tightness", "--profile", "large"], ["figures", "--out", str(tmp_path)]):
            assert run("opnorm reproduce", lambda argv=argv: paper.main(argv)) == 2
            err = capsys.readouterr().err
            assert err.startswith("opnorm reproduce: ") and "expected " in err and err.count("\n") == 1

    def test_a_profile_sets_what_is_not_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Tightness] = []
        monkeypatch.setattr(tightness, "run", lambda options, argv: asked.append(options) or sys.exit(0))
        for argv in (["--profile", "paper", "--kernels", "3"], ["--sizes", "9"]):
            with pytest.raises(SystemExit):
                paper.main(["tightness", *argv])
        assert asked[0].sizes == tuple(range(7, 129)) and asked[0].kernels == 3
        assert asked[1].sizes == (9,) and asked[1].larger == (7, 14, 28, 56) and asked[1].kernels == 1000


TINY = ("--kernels", "5", "--sizes", "7", "17", "--larger", "7", "--volumes", "5")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `opnorm reproduce tightness` finds, of few kernels and sizes."""
    out = tmp_path_factory.mktemp("tightness")
    assert paper.main(["tightness", *TINY, "--out", str(out), "--docs", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["tightness.json", "tightness.svg"]
    content: dict[str, Any] = json.loads((out / "tightness.json").read_text())
    return content


class TestTightness:
    def test_bounds_are_above_the_norm_and_references_below(self, result: dict[str, Any]) -> None:
        assert [*result["cells"]] == [
            "3×3, N = 7", "3×3, N = 17", "5×5, N = 7", "7×7, N = 7", "3×3, stride 2, N = 7", "3×3×3, N = 5",
        ]  # fmt: skip
        for cell in result["cells"].values():
            assert 0 <= cell["truth apart"] < 1.01e-5
            assert cell["reference"]["largest"] <= 0
            for key in ("paper", "FourierBound", "auto"):
                assert 0 <= cell[key]["least"] <= cell[key]["low"] <= cell[key]["median"] <= cell[key]["high"]

    def test_numbers_are_those_of_a_dense_matrix(self, result: dict[str, Any]) -> None:
        from opnorm.lab.data import generator

        kernels = torch.randn(5, 1, 3, 3, generator=generator(0, "tightness", "3×3", 7), dtype=torch.float64)
        geometry = ConvGeometry(1, 1, 3, (7, 7), padding=1)
        norms = [torch.linalg.matrix_norm(ConvOperator(geometry, k[None]).to_dense(), 2) for k in kernels]
        bounds = torch.fft.fft2(kernels[:, 0], s=(9, 9)).abs().amax((1, 2))
        over = (bounds / torch.stack(norms) - 1).median()
        assert result["cells"]["3×3, N = 7"]["paper"]["median"] == pytest.approx(float(over), abs=1e-6)

    def test_the_reference_is_thirty_iterations_as_the_paper_writes_them(self) -> None:
        geometry = ConvGeometry(2, 2, 3, (6, 5), padding=1, groups=2)
        operator = ConvOperator(geometry, torch.randn(geometry.weight_shape, dtype=torch.float64))
        start = torch.randn(2, 6, 5, dtype=torch.float64)
        found = tightness.iterated(operator, start)
        for channel in range(2):
            single = ConvOperator(ConvGeometry(1, 1, 3, (6, 5), padding=1), operator.weight[channel : channel + 1])
            matrix, v = single.to_dense(), start[channel].flatten()
            for _ in range(30):
                v = matrix.T @ matrix @ v / v.norm()
            assert float(found[channel]) == pytest.approx(float(v.norm().sqrt()), rel=1e-12)


class TestPage:
    def test_a_section_replaces_its_older_self_alone(self) -> None:
        page = with_section("# Results\n\nText.\n", "a", "\nfirst\n")
        page = with_section(page, "b", "\\g<0> second")
        assert with_section(page, "a", "third") == page.replace("first", "third")
        assert "first" in page and "\\g<0> second" in page and page.startswith("# Results\n\nText.\n")

    def test_drawing_again_changes_nothing(self, tmp_path: Path) -> None:
        docs = tmp_path / "docs"
        docs.mkdir()
        (docs / "results.md").write_text("# Results\n")
        assert paper.main(["tightness", *TINY, "--out", str(tmp_path), "--docs", str(docs)]) == 0
        figure = docs / "img" / "results" / "tightness.svg"
        before = figure.read_bytes(), (docs / "results.md").read_text()
        assert "## Gaussian kernels" in before[1] and digest(tmp_path / "tightness.json").encode() in before[0]
        draw(tmp_path, docs, ["tightness"])
        assert (figure.read_bytes(), (docs / "results.md").read_text()) == before

    def test_the_section_compares_with_what_was_published(self, result: dict[str, Any]) -> None:
        result = copy.deepcopy(result)
        from opnorm.lab.paper.sections import tightness as section

        page = " ".join(section(result).split())
        small = result["cells"]["3×3, N = 7"]
        assert "The published medians** are 17 % at N = 7." in page and NOISE["tightness"] in page
        assert f"Measured here, for N = 7 and N = 17, the paper's bound is {small['paper']['median']:.2%}"[:-1] in page
        small["paper to K alone"]["median"] = 0.17
        assert "nearer to the published numbers" in " ".join(section(result).split())
        small["paper to K alone"]["median"] = 9.0
        assert "nearer to the published numbers" not in " ".join(section(result).split())

    def test_a_figure_shows_its_numbers(self) -> None:
        cell = {"median": 0.1, "low": 0.05, "high": 0.2, "least": 0.01, "largest": 0.9, "above": 0.0}
        keys = ("paper", "FourierBound", "auto", "reference", "paper to reference", "paper to K alone")
        result = {
            "cells": {
                f"{family} {n}": {"family": family, "N": n} | dict.fromkeys(keys, cell)
                for family in ("3×3", "5×5")
                for n in (7, 28)
            }
        }
        drawn = svg("tightness", result, "here")
        result["cells"]["3×3 28"] |= {"paper": cell | {"median": 0.15}}
        assert svg("tightness", result, "here") != drawn
        from opnorm.lab.paper.figures import FIGURES

        (axes, *_) = FIGURES["tightness"](result).get_axes()
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert lines["the paper's bound to the norm"].get_xydata().tolist() == [[7, 0.1], [28, 0.15]]
