"""`opnorm eval`: what it finds is what the run reported and what the weights do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

import opnorm
from opnorm.lab.cli import main
from opnorm.lab.data import load_data
from opnorm.lab.loading import load_checkpoint
from opnorm.models import build
from outcome import Command, Outcome

TINY = ("--arg", "width=5", "--batch-size", "257", "--epochs", "2", "--device", "cpu", "--radii", "0.001", "0.003")
MODEL = ("ds_convnet", "--arg", "width=5")
ZOO = """
import torch
from torch import nn

def nine():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))

def doubled():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()

class Squared(nn.Sequential):
    def forward(self, x):
        return super().forward(x) ** 2

def without_bound():
    return Squared(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run`, of a tiny network, and `diverged`."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *TINY, "--out", str(folder / "run")]) == 0
    plain = ("--no-normalize", "--optimizer", "sgd", "--lr", "1e30", "--schedule", "constant")
    assert main(["train", *TINY, *plain, "--out", str(folder / "diverged")]) == 3
    return folder


@pytest.fixture
def evaluate(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """`opnorm eval` in a folder of its own, beside a copy of the runs."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])
    capsys.readouterr()

    def run(*argv: str) -> Outcome:
        code = main(["eval", *argv, "--device", "cpu"])
        return Outcome(code, *capsys.readouterr())

    return run


def facts(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return content


def data_of(page: str) -> dict[str, Any]:
    text = Path(page).read_text().split('<script type="application/json" id="data">')[1].split("</script>")[0]
    content: dict[str, Any] = json.loads(text)
    return content


def pictures(folder: Path) -> None:
    """Test images of two colours in two classes."""
    from PIL import Image

    for i, colour in enumerate(((220, 30, 30), (30, 30, 220))):
        (folder / str(i)).mkdir(parents=True)
        for j in range(5):
            Image.new("RGB", (20 + j, 17), colour).save(folder / str(i) / f"{j}.png")


class TestRun:
    def test_it_finds_what_the_run_has_reported(self, evaluate: Command) -> None:
        outcome = evaluate("run", "--json", "e.json")
        assert outcome.code == 0, outcome.err
        found, reported = facts("e.json"), facts("run/result.json")
        keys = ("test_accuracy", "certified_accuracy", "certified_curve", "confusion", "bound", "data", "config")
        for key in keys:
            assert found[key] == reported[key]
        assert {*found["certified_accuracy"]} == {"0.001", "0.003"}
        assert 0 < found["certified_accuracy"]["0.003"] < found["certified_accuracy"]["0.001"] < found["test_accuracy"]
        assert found["certificate"]["bound"] == facts("run/certificate.json")["bound"] == found["bound"]
        assert found["trained_by"] == reported["environment"]["command"]
        assert found["environment"]["command"] == "opnorm eval run --json e.json --device cpu"
        assert "history" not in found

    def test_the_radii_can_be_others(self, evaluate: Command) -> None:
        assert evaluate("run", "--radii", "0", "0.002", "9", "--json", "e.json").code == 0
        found, curve = facts("e.json"), facts("run/result.json")["certified_curve"]
        accuracies = found["certified_accuracy"]
        assert (accuracies["0.0"], accuracies["9.0"]) == (found["test_accuracy"], 0.0)
        before, after = min(p for r, p in curve if r <= 0.002), max(p for r, p in curve if r >= 0.002)
        assert after <= accuracies["0.002"] <= before

    def test_what_a_person_sees(self, evaluate: Command) -> None:
        outcome = evaluate("run", "--html", "e.html")
        found = facts("run/result.json")
        assert outcome.err == ""
        lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
        assert lines[0].startswith("layer operation")
        assert "shown 0 1 2 3 4 5 6 7 8 9" in lines
        assert "3 " + " ".join(str(n) if n else "·" for n in found["confusion"][3]) in lines
        assert f"test accuracy {found['test_accuracy']:.2%} on 364 images" in lines
        assert f"certified accuracy at radius 0.001: {found['certified_accuracy']['0.001']:.2%}" in lines
        assert lines[-1] == "written to e.html"
        assert len(evaluate("run", "--full").out.splitlines()) > len(lines)

    def test_the_page_has_the_curves_of_the_run_and_both_commands(self, evaluate: Command) -> None:
        assert evaluate("run", "--html", "e.html").code == 0
        data = data_of("e.html")
        assert len(data["result"]["history"]) == 2
        trained_by = facts("run/result.json")["environment"]["command"]
        assert data["shown"]["commands"] == ["opnorm eval run --html e.html --device cpu", trained_by]
        assert data["certificate"] == facts("run/certificate.json") | {"times": data["certificate"]["times"]}

    def test_images_are_standardised_as_those_of_the_training(self, evaluate: Command) -> None:
        content = facts("run/result.json")
        content["data"]["std"] = [2.0]
        Path("run/result.json").write_text(json.dumps(content))
        assert evaluate("run", "--json", "e.json").code == 0
        assert facts("e.json")["data"]["std"] == [2.0]
        assert facts("e.json")["bound"] == pytest.approx(content["bound"] / 2, rel=1e-6)

    def test_the_curves_of_the_run_are_not_those_of_other_images(self, evaluate: Command) -> None:
        Path("zoo.py").write_text(
            "from torch import nn\ndef rgb():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))\n"
        )
        pictures(Path("red"))
        pictures(Path("other"))
        Path("other/0/0.png").write_bytes(Path("other/1/0.png").read_bytes())
        argv = ("--data", "folder", "--image-size", "8", "--model", "zoo.py:rgb", "--epochs", "2", "--batch-size", "4")
        assert main(["train", *argv, "--data-path", "red", "--logit-scale", "1", "--out", "pictures"]) == 0
        for more, records in (((), 2), (("--data-path", "other"), 0)):
            assert evaluate("pictures", *more, "--html", "e.html").code == 0
            assert len(data_of("e.html")["result"]["history"]) == records


class TestModel:
    def test_a_model_with_the_weights_of_the_run_is_the_run(self, evaluate: Command) -> None:
        weights = ("--checkpoint", "run/model.safetensors")
        outcome = evaluate(*MODEL, *weights, "--data", "digits", "--radii", "0.001", "--json", "e.json")
        assert outcome.code == 0, outcome.err
        found, reported = facts("e.json"), facts("run/result.json")
        for key in ("test_accuracy", "confusion", "bound", "parameters"):
            assert found[key] == reported[key]
        assert found["certified_accuracy"]["0.001"] == reported["certified_accuracy"]["0.001"]
        assert "weights as built" not in outcome.out

    def test_numbers_are_those_of_the_library(self, evaluate: Command) -> None:
        radii = (0.0, 0.001, 0.003)
        argv = ("--checkpoint", "run/model.safetensors", "--radii", *map(str, radii), "--json", "e.json")
        assert evaluate(*MODEL, *argv).code == 0
        model = build("ds_convnet", width=5).eval()
        load_checkpoint(model, Path("run/model.safetensors"))
        batches = [*load_data("digits").test_batches(1000, torch.device("cpu"))]
        certificate = opnorm.certify(model, (1, 8, 8), lower=False)
        expected = certificate.certified_accuracy(model, batches, radii)
        found = facts("e.json")
        assert {float(k): v for k, v in found["certified_accuracy"].items()} == pytest.approx(expected)
        assert found["bound"] == pytest.approx(certificate.bound, rel=1e-6)

    def test_without_weights_it_says_so(self, evaluate: Command) -> None:
        outcome = evaluate(*MODEL, "--html", "e.html")
        assert outcome.code == 0
        assert "weights as built, seed 0" in outcome.out
        assert "opnorm eval ds_convnet" in Path("e.html").read_text()

    def test_a_model_without_a_certificate(self, evaluate: Command) -> None:
        outcome = evaluate("zoo.py:without_bound", "--json", "e.json", "--html", "e.html")
        assert outcome.code == 0
        assert "no certificate: expected operations" in outcome.out
        assert (facts("e.json")["bound"], facts("e.json")["certificate"]) == (None, None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "expected the folder of a run of opnorm train, or a model as one of ds_convnet"),
        ([".."], "expected the folder of a run of opnorm train"),
        (["diverged"], "expected a run that has finished, got diverged, which diverged: "),
        (["unfinished"], "opnorm train --resume unfinished goes on"),
        (["broken"], "expected the result of a run in broken/result.json"),
        (["run", "--checkpoint", "run/model.safetensors"], "expected --checkpoint and --arg with a model"),
        (["run", "--radii", "-1"], "expected --radii of at least 0 and finite, got -1.0"),
        (["run", "--radii", "inf"], "expected --radii of at least 0 and finite, got inf"),
        (["run", "--workers", "-1"], "expected --workers of at least 0"),
        (["run", "--html", "nowhere/e.html"], "expected --html as a file in a folder that exists"),
        (["run", "--json", "run"], "expected --json as a file in a folder that exists, got run"),
        (["run", "--data", "mnist"], "expected one of cifar10, digits"),
        (["run", "--data", "folder", "--data-path", "red"], "expected images of 1×8×8, on which"),
        (["run", "--data-path", "nowhere"], "nowhere"),
        (["zoo.py:nine"], "expected a model with 10 logits an image"),
        (["zoo.py:doubled"], "expected a model for images of 1×8×8, got zoo.py:doubled: "),
        ([*MODEL, "--checkpoint", "nowhere.pt"], "nowhere.pt, which is not there"),
        ([*MODEL, "--data", "cifar10", "--data-path", "nowhere"], "got nowhere"),
        (["ds_resnet34", "--arg", "in_channels=3"], "expected a model for images of 1×8×8"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_wrong_values_get_one_line(evaluate: Command, argv: list[str], words: str) -> None:
    pictures(Path("red"))
    for name, text in (("unfinished/config.json", "{}"), ("broken/result.json", "[]")):
        Path(name).parent.mkdir()
        Path(name).write_text(text)
    outcome = evaluate(*argv)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("opnorm eval: ")
    assert outcome.err.count("\n") == 1
    assert words in outcome.err
