"""`opnorm reproduce pretrained`: trained kernels from a file, every method, and what is said of them."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from safetensors.torch import save_file

from opnorm import ConvGeometry, ConvOperator, models
from opnorm.lab import paper
from opnorm.lab.cli import run
from opnorm.lab.paper import pretrained
from opnorm.lab.paper.pretrained import METHODS, measure
from opnorm.lab.paper.pretrained_page import BELOW, FLOOR, averages, figure, groups, pretrained_claims
from opnorm.lab.paper.sections import SECTIONS

MODEL = ("--model", "ds_convnet", "--input", "1,8,8")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small network with two depthwise layers, one of stride 2."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(models.build("ds_convnet").state_dict(), path)
    return path


@pytest.fixture(scope="module")
def result(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("pretrained")
    assert paper.main(["pretrained", *MODEL, "--weights", str(weights), "--out", str(out), "--docs", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["pretrained.json", "pretrained.svg"]
    content: dict[str, Any] = json.loads((out / "pretrained.json").read_text())
    return content


class TestMeasure:
    def test_values_are_those_over_a_dense_matrix(self) -> None:
        geometry = ConvGeometry(3, 3, 3, (7, 5), stride=2, padding=1, groups=3)
        operator = ConvOperator(geometry, torch.randn(geometry.weight_shape))
        found = measure(operator)
        norm = float(torch.linalg.matrix_norm(operator.to_dense().double(), 2))
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        spectrum = torch.fft.fft2(operator.weight[:, 0].double(), s=(9, 7)).abs().amax()
        assert found["over"]["Runkel2021"] == pytest.approx(float(spectrum) / norm - 1, abs=1e-5)
        for name, over in found["over"].items():
            assert found["guarantee"][name] not in ("upper", "exact") or over >= -1e-6, name
            assert found["guarantee"][name] != "lower" or over <= 1e-6, name

    def test_what_a_method_refuses_has_its_reason(self) -> None:
        geometry = ConvGeometry(3, 3, 3, (7, 5), padding=1, groups=3)
        found = measure(ConvOperator(geometry, torch.randn(geometry.weight_shape)))
        assert found["refused"].keys() | found["over"].keys() == METHODS.keys()
        assert found["refused"] and all(found["refused"].values())


class TestCommand:
    def test_every_depthwise_layer_of_the_file_is_a_cell(self, result: dict[str, Any], weights: Path) -> None:
        built = models.build("ds_convnet").state_dict()
        depthwise = [name.removesuffix(".weight") for name in built if name.endswith("depthwise.weight")]
        assert [*result["cells"]] == depthwise
        assert result["settings"]["weights"] == weights.name and result["changes"] == ["model", "input"]

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ((), "expected --weights FILE, the trained weights of mobilenet_v2"),
            (("--weights", "missing.safetensors"), "which is not there"),
            (("--weights", "WEIGHTS"), "does not fit the model"),
            (("--weights", "WEIGHTS", "--model", "ds_convnet", "--input", "1,any,8"), "expected --input as numbers"),
        ],
    )
    def test_what_is_wrong_is_one_line(
        self, argv: tuple[str, ...], message: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = [str(weights) if word == "WEIGHTS" else word for word in argv]
        assert run("opnorm", lambda: paper.main(["pretrained", *given, "--out", str(tmp_path)])) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
        assert not list(tmp_path.iterdir())

    def test_a_kill_loses_one_layer(
        self, result: dict[str, Any], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        argv = ["pretrained", *MODEL, "--weights", str(weights), "--out", str(tmp_path), "--docs", str(tmp_path)]
        seen = killed_in_the_second_layer(argv, monkeypatch)
        assert [file.name for file in tmp_path.iterdir()] == ["pretrained.part.json"]
        monkeypatch.setattr(pretrained, "measure", lambda operator: seen.append(operator) or measure(operator))
        assert paper.main(argv) == 0
        assert len(seen) == len(result["cells"])
        again = json.loads((tmp_path / "pretrained.json").read_text())
        assert again["cells"].keys() == result["cells"].keys()
        for layer, cell in again["cells"].items():
            assert cell["over"] == pytest.approx(result["cells"][layer]["over"], abs=1e-6)

    def test_other_weights_of_the_same_name_do_not_go_on(
        self, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["pretrained", *MODEL, "--out", str(tmp_path / "out"), "--docs", str(tmp_path)]
        killed_in_the_second_layer([*argv, "--weights", str(weights)], monkeypatch)
        torch.manual_seed(1)
        other = tmp_path / weights.name
        save_file(models.build("ds_convnet").state_dict(), other)
        assert run("opnorm", lambda: paper.main([*argv, "--weights", str(other)])) == 2
        assert "got another sha256" in capsys.readouterr().err


def killed_in_the_second_layer(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> list[ConvOperator]:
    """Begin, and be interrupted when one layer is done; the layers that were."""
    seen: list[ConvOperator] = []

    def dying(operator: ConvOperator) -> dict[str, Any]:
        if seen:
            raise KeyboardInterrupt
        seen.append(operator)
        return measure(operator)

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "measure", dying)
        with pytest.raises(KeyboardInterrupt):
            paper.main(argv)
    return seen


class TestPage:
    def test_claims_follow_the_numbers(self, result: dict[str, Any]) -> None:
        assert all(pretrained_claims(result).values())
        ours = {"auto": 0.001, "FourierBound": 0.002, "Exact": 0.0}
        changed = copy.deepcopy(result)
        for cell in changed["cells"].values():
            cell["over"] = dict.fromkeys(cell["over"], 0.01) | ours
        assert all(pretrained_claims(changed).values())
        for name, value in (("FourierBound", 9.0), ("auto", 9.0), ("Runkel2021", -0.5), ("Delattre2024", 0.0005)):
            other = copy.deepcopy(changed)
            other["cells"]["2.depthwise"]["over"][name] = value
            assert not all(pretrained_claims(other).values()), name

    def test_averages_are_of_each_stride(self, result: dict[str, Any]) -> None:
        parts = groups(result)
        assert [*parts] == sorted({f"stride {cell['stride'][0]}" for cell in result["cells"].values()})
        values = [cell["over"]["Tsuzuku2018"] for cell in parts["stride 1"]]
        found = averages(parts["stride 1"], "Tsuzuku2018")
        assert found is not None
        assert (found["mean"], found["largest"]) == (pytest.approx(sum(values) / len(values)), max(values))
        assert averages(parts["stride 1"], "GramIteration") is None

    def test_published_numbers_stand_beside_mobilenet_alone(self, result: dict[str, Any]) -> None:
        assert "as published" not in SECTIONS["pretrained"](result)
        page = SECTIONS["pretrained"](of_the_paper(result))
        assert "| the paper, as published |  | 2.80 % ± 1.55 % |  | 75.6 % ± 20.6 % |  |" in page

    def test_the_section_has_every_layer_and_no_path(self, result: dict[str, Any]) -> None:
        page = SECTIONS["pretrained"](result)
        assert all(f"| `{layer}` |" in page for layer in result["cells"])
        command = re.search(r"`opnorm reproduce .*?`", page)
        assert command is not None and "/" not in command[0]

    def test_a_figure_shows_exact_values_and_what_is_below(self, result: dict[str, Any]) -> None:
        changed = copy.deepcopy(result)
        first = next(iter(groups(changed)["stride 1"]))
        first["over"] |= {"auto": 0.0, "Farnia2018": -0.01, "Runkel2021": 0.25}
        lines = {line.get_label(): line for line in figure(changed).axes[0].get_lines()}
        heights = [lines[name].get_ydata()[0] for name in ("auto", "Farnia2018", "Runkel2021")]
        assert heights == [FLOOR, BELOW, 0.25]
        assert all(math.isnan(y) for y in lines["auto"].get_ydata()[[-1]])


def of_the_paper(result: dict[str, Any]) -> dict[str, Any]:
    """The same as if it were of MobileNetV2: 13 layers of stride 1, 4 of stride 2."""
    cell = next(iter(result["cells"].values()))
    strides = [1] * 13 + [2] * 4
    cells = {f"layer {i}": cell | {"stride": [stride, stride]} for i, stride in enumerate(strides)}
    settings = result["settings"] | {"model": "mobilenet_v2", "input": "3,224,224"}
    return result | {"cells": cells, "settings": settings}
