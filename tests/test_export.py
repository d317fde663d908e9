"""`opnorm export`: other programs compute from the file what the network computes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tyro", reason="the extra lab is not installed")

from safetensors import safe_open
from safetensors.torch import load_file

from opnorm.lab.cli import main
from opnorm.lab.data import load_data
from opnorm.lab.export_formats import FORMATS
from opnorm.lab.loading import build_model
from opnorm.lab.trained import trained_in
from opnorm.models import build
from outcome import Command, Outcome

TINY = ("--arg", "width=5", "--batch-size", "257", "--epochs", "1", "--device", "cpu")
STD = 0.3  # of the pixels of the run, as if it had been trained with it
ZOO = """
import torch
from torch import nn
from opnorm import Normalizer

def normalised():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 5 * 9, 4))
    Normalizer(model, (3, 7, 11), K=0.5)
    return model

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())

class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

def branch():
    return Branch(3, 3)

def doubled():
    return nn.Linear(3, 2).double()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run`, of a tiny network that takes images with another standard deviation."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *TINY, "--K", "2", "--out", str(folder / "run")]) == 0
    content = json.loads((folder / "run/result.json").read_text())
    content["data"] |= {"mean": [0.2], "std": [STD]}
    (folder / "run/result.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def export(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """`opnorm export` in a folder of its own, beside a copy of the run."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    capsys.readouterr()

    def run(*argv: str) -> Outcome:
        code = main(["export", *argv])
        return Outcome(code, *capsys.readouterr())

    return run


def onnx_outputs(path: str, x: Tensor) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra dev is not installed")
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["input"]
    return torch.from_numpy(session.run(["output"], {"input": x.numpy()})[0])


def pixels() -> Tensor:
    return next(load_data("digits").test_batches(37, torch.device("cpu"), standardize=False))[0].contiguous()


class TestRun:
    def test_onnx_takes_pixels(self, export: Command) -> None:
        outcome = export("run", "--to", "model.onnx")
        assert outcome.code == 0, outcome.err
        assert "an input is 1×8×8, pixels from 0 to 1\nchecked with onnxruntime" in outcome.out
        x, network = pixels(), trained_in(Path("run")).model
        expected = network((x - 0.2) / STD)
        for n in (1, 5, 37):
            torch.testing.assert_close(onnx_outputs("model.onnx", x[:n]), expected[:n], rtol=1e-5, atol=1e-6)

    def test_onnx_without_the_standardisation(self, export: Command) -> None:
        outcome = export("run", "--to", "model.onnx", "--no-standardize")
        assert "an input is 1×8×8, (pixel - mean)/std for pixels from 0 to 1, mean 0.2 and std 0.3" in outcome.out
        x, network = pixels(), trained_in(Path("run")).model
        torch.testing.assert_close(onnx_outputs("model.onnx", x), network(x), rtol=1e-5, atol=1e-6)

    def test_a_state_dict_fits_the_plain_model(self, export: Command) -> None:
        outcome = export("run", "--to", "weights.pt")
        assert outcome.code == 0, outcome.err
        assert "checked by loading the file into the model: same outputs" in outcome.out
        model = build("ds_convnet", width=5).eval()
        model.load_state_dict(torch.load("weights.pt", weights_only=True))
        x = pixels()
        torch.testing.assert_close(model(x), trained_in(Path("run")).model(x), rtol=0, atol=0)

    def test_safetensors_say_what_they_are(self, export: Command) -> None:
        assert export("run", "--to", "weights.safetensors").code == 0
        result = json.loads(Path("run/result.json").read_text())
        with safe_open("weights.safetensors", "pt") as file:
            facts = file.metadata()
        model = build(facts["model"], **json.loads(facts["arguments"])).eval()
        model.load_state_dict(load_file("weights.safetensors"))
        x = pixels()
        torch.testing.assert_close(model(x), trained_in(Path("run")).model(x), rtol=0, atol=0)
        values = {name: json.loads(facts[name]) for name in ("K", "bound", "mean", "std", "input", "classes")}
        assert values == {
            "K": 2.0, "bound": result["bound"], "mean": [0.2], "std": [STD], "input": [1, 8, 8],
            "classes": result["data"]["classes"],
        }  # fmt: skip
        assert (facts["K_per"], facts["scaling"]) == ("pair", "hard")
        assert facts["trained_by"] == result["environment"]["command"]
        assert facts["takes"].startswith("(pixel - mean)/std for pixels from 0 to 1")

    def test_onnx_says_what_it_is(self, export: Command) -> None:
        import onnx

        assert export("run", "--to", "model.onnx").code == 0
        proto = onnx.load("model.onnx")
        facts = {entry.key: entry.value for entry in proto.metadata_props}
        assert (facts["model"], facts["takes"]) == ("ds_convnet", "pixels from 0 to 1")
        onnx.checker.check_model(proto, full_check=True)

    def test_without_onnxruntime_the_reference_checks(self, export: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        find_spec = "opnorm.lab.export_formats.importlib.util.find_spec"
        monkeypatch.setattr(find_spec, lambda name: None)
        outcome = export("run", "--to", "model.onnx")
        assert outcome.code == 0, outcome.err
        assert "checked with onnx's reference evaluator: outputs differ by at most" in outcome.out

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_file_that_computes_something_else_is_not_left(
        self, export: Command, monkeypatch: pytest.MonkeyPatch, suffix: str
    ) -> None:
        path, form = Path(f"model{suffix}"), FORMATS[suffix]
        path.write_text("as before")

        def wrong(network: nn.Module, *rest: Any) -> bytes:
            other = build("ds_convnet", width=5).eval()
            return form.write(other, *rest)

        monkeypatch.setitem(FORMATS, suffix, type(form)(form.says, wrong, form.read))
        more = ("--no-standardize",) if suffix == ".onnx" else ()
        outcome = export("run", "--to", str(path), *more)
        assert outcome.code == 1
        assert outcome.err.startswith("opnorm export: expected the same outputs to rounding, got a difference of")
        assert path.read_text() == "as before"
        assert not [*Path().glob("*.part*")]


class TestModel:
    @pytest.mark.parametrize("suffix", FORMATS)
    def test_weights_that_a_normalizer_gives_are_written_as_they_are(self, export: Command, suffix: str) -> None:
        outcome = export("zoo.py:normalised", "--input", "3,7,11", "--to", f"model{suffix}")
        assert outcome.code == 0, outcome.err
        assert "weights as built, seed 0" in outcome.out
        model = build_model("zoo.py:normalised", {}, seed=0).eval()
        x = torch.rand(5, 3, 7, 11)
        if suffix == ".onnx":
            torch.testing.assert_close(onnx_outputs("model.onnx", x), model(x), rtol=1e-5, atol=1e-6)
            return
        content = load_file(f"model{suffix}") if suffix == ".safetensors" else torch.load(f"model{suffix}")
        plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 5 * 9, 4))
        plain.load_state_dict(content)
        torch.testing.assert_close(plain(x), model(x), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_tied_weights(self, export: Command, suffix: str) -> None:
        outcome = export("zoo.py:Tied", "--input", "6", "--to", f"model{suffix}")
        assert outcome.code == 0, outcome.err

    def test_formats_follow_from_one_another(self, export: Command) -> None:
        model = ("ds_convnet", "--arg", "width=5", "--input", "1,8,8")
        assert export("run", "--to", "a.pt").code == 0
        assert export(*model, "--checkpoint", "a.pt", "--to", "b.safetensors").code == 0
        outcome = export(*model, "--checkpoint", "b.safetensors", "--to", "c.pt")
        assert outcome.out.startswith(
            "the weights, a state dict for torch.load with weights_only=True; an input is 1×8×8"
        )
        first, last = torch.load("a.pt"), torch.load("c.pt")
        torch.testing.assert_close(first, last, rtol=0, atol=0)

    def test_double_precision(self, export: Command) -> None:
        assert export("zoo.py:doubled", "--input", "3", "--to", "model.onnx").code == 0
        x = torch.rand(4, 3, dtype=torch.float64)
        model = build_model("zoo.py:doubled", {}, seed=0)
        torch.testing.assert_close(onnx_outputs("model.onnx", x), model(x), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(("name", "input"), [("ds_resnet34", "3,32,32"), ("mobilenet_v2", "3,32,32")])
    @pytest.mark.slow
    def test_the_networks_of_the_paper(self, export: Command, name: str, input: str) -> None:
        outcome = export(name, "--input", input, "--to", "model.onnx")
        assert outcome.code == 0, outcome.err
        model, x = build_model(name, {}, seed=0).eval(), torch.rand(3, 3, 32, 32)
        expected = model(x).detach()
        largest = float(expected.abs().max())
        torch.testing.assert_close(onnx_outputs("model.onnx", x), expected, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "--to"),
        (["run", "--to", "model.h5"], "expected --to as a file that ends in .onnx, .safetensors, .pt, got model.h5"),
        (["run", "--to", "nowhere/model.pt"], "expected --to as a file in a folder that exists"),
        (["run", "--to", "a.pt", "--no-standardize"], "expected --no-standardize with .onnx, got a.pt"),
        (["run", "--to", "a.pt", "--input", "3"], "expected --checkpoint, --arg and --input with a model"),
        (["nowhere", "--to", "a.pt"], "expected the folder of a run of opnorm train, or a model as one of ds_convnet"),
        (["ds_convnet", "--to", "a.pt"], "expected --input with the model ds_convnet"),
        (["ds_convnet", "--to", "a.pt", "--input", "1,any,any"], "expected --input with a number for every size"),
        (["ds_convnet", "--to", "a.pt", "--input", "1,x"], "expected --input as positive sizes"),
        (["ds_convnet", "--to", "a.onnx", "--input", "3,8,8"], "expected a model for inputs of 3×8×8, got ds_convnet"),
        (["ds_convnet", "--to", "a.pt", "--input", "3,8,8"], "expected a model for inputs of 3×8×8, got ds_convnet"),
        (["ds_convnet", "--to", "a.onnx", "--input", "1,8,8", "--no-standardize"], "--no-standardize with a run"),
        (["ds_convnet", "--to", "a.pt", "--input", "1,8,8", "--checkpoint", "no.pt"], "no.pt, which is not there"),
        (["zoo.py:branch", "--to", "a.onnx", "--input", "3"], "expected a network that can be written as ONNX"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_wrong_values_get_one_line(export: Command, argv: list[str], words: str) -> None:
    outcome = export(*argv)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("opnorm export: ")
    assert outcome.err.count("\n") == 1
    assert words in outcome.err
    assert not [*Path().glob("*.part*")]
