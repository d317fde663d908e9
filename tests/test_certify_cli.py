"""`opnorm certify`: the table, the files, and one line for whatever is wrong."""

from __future__ import annotations

import json
import math

import pytest
import torch

import opnorm
from opnorm.lab.cli import main
from opnorm.models import mobilenet_v2

pytest.importorskip("tyro")
MODEL = ["certify", "mobilenet_v2", "--input", "3,32,32", "--arg", "width_mult=0.35", "--arg", "num_classes=7"]


def test_the_command_prints_and_writes_the_certificate(tmp_path, capsys):
    html, numbers = tmp_path / "report.html", tmp_path / "report.json"
    weights, data = tmp_path / "weights.pt", tmp_path / "data.pt"
    torch.manual_seed(5)
    model = mobilenet_v2(width_mult=0.35, num_classes=7)
    torch.save(model.state_dict(), weights)
    torch.save({"inputs": torch.randn(5, 3, 32, 32), "labels": torch.randint(0, 7, (5,))}, data)
    files = ["--html", str(html), "--json", str(numbers), "--checkpoint", str(weights), "--data", str(data)]
    assert main([*MODEL, "--samples", "1", *files]) == 0
    shown = capsys.readouterr().out
    content = json.loads(numbers.read_text())
    expected = opnorm.certify(model, (3, 32, 32), lower=False)
    assert content["bound"] == expected.bound
    assert 0 < content["lower"] <= content["bound"]
    assert content["environment"]["command"].startswith("opnorm certify mobilenet_v2")
    assert set(content["certified_accuracy"]) == {str(float(e)) for e in (0, 36 / 255, 72 / 255, 108 / 255)}
    assert "MobileNetV2 on 3×32×32" in shown and "certified accuracy" in shown and "features.0.0" in shown
    assert html.read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob("*.part"))


def test_the_seed_draws_the_weights_and_product_is_larger(capsys, tmp_path):
    bounds = []
    for extra in ([], ["--composition", "product"], ["--seed", "1"]):
        assert main([*MODEL, "--samples", "0", "--json", str(tmp_path / "c.json"), *extra]) == 0
        bounds.append(json.loads((tmp_path / "c.json").read_text())["bound"])
    assert bounds[0] < bounds[1] and bounds[2] not in bounds[:2] and all(map(math.isfinite, bounds))
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["certify", "mobilenet_v2"], "--input"),
        (["certify", "nonsense", "--input", "3,8,8"], "expected MODEL"),
        (["certify", "mobilenet_v2", "--input", "3,x,8"], "positive sizes"),
        ([*MODEL, "--samples", "-1"], "--samples"),
        ([*MODEL, "--epsilons", "0.1", "-0.1"], "--epsilons"),
        ([*MODEL, "--html", "/nowhere/at/all.html"], "folder that exists"),
        ([*MODEL, "--checkpoint", "missing.pt"], "not there"),
        ([*MODEL, "--data", "missing.pt"], "not there"),
        ([*MODEL, "--ord", "3"], "1, 2, inf"),
        (["certify", "mobilenet_v2", "--input", "2,32,32"], "trace"),
        (["certify", "torch.nn:LayerNorm", "--arg", "normalized_shape=4", "--input", "4"], "layer_norm"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_data_without_inputs_is_refused(tmp_path, capsys):
    inputs = torch.ones(2, 3, 32, 32)
    for content in (
        {"x": torch.ones(2)},
        {"inputs": inputs, "labels": torch.ones(3)},
        {"inputs": inputs, "labels": [1, 2]},
    ):
        torch.save(content, tmp_path / "data.pt")
        assert main([*MODEL, "--data", str(tmp_path / "data.pt")]) == 2
        assert "expected" in capsys.readouterr().err
