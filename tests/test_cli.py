"""The command `opnorm`: what a person types and sees, and the files that are written."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("tyro", reason="the extra lab is not installed")

import opnorm
from opnorm import ConvGeometry, ConvOperator, operator_norm
from opnorm.lab import cli, record
from opnorm.lab.arguments import METHODS, read_method, read_settings, read_shapes
from opnorm.lab.bench import BENCHMARKS
from opnorm.lab.cli import COMMANDS, EXTRAS, UsageError, main
from opnorm.lab.eval import Eval
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.norms_table import number_text
from opnorm.lab.paper import EXPERIMENTS, OTHERS
from opnorm.lab.paper.everything import Everything
from opnorm.lab.train_config import read_config
from opnorm.lab.train_report import PAGE
from opnorm.norms import PowerIteration
from outcome import Outcome

ROOT = Path(__file__).parents[1]
MODELS = """
import torch
from torch import nn

def small(width=4, mode="zeros"):
    first = nn.Conv2d(3, width, 3, stride=2, padding_mode=mode)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(width, width, 3, groups=width))

class Holder:
    model = nn.Linear(3, 2)

def with_spare():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].spare = nn.Linear(2, 2)
    return model

def nothing():
    return nn.Sequential(nn.ReLU())

def wrong():
    return 5

def not_a_number():
    model = small()
    nn.init.constant_(model[0].weight, float("nan"))
    return model

number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of models; the Python path and modules are afterwards as before."""
    (tmp_path / "zoo_of_tests.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("zoo_of_tests", None)


@pytest.fixture
def opnorm_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(*arguments: str) -> Outcome:
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return call


GROUPS = {"bench": BENCHMARKS, "reproduce": EXPERIMENTS | OTHERS}
EVERY = [(name,) for name in COMMANDS] + [(group, name) for group, names in GROUPS.items() for name in names]

SMALL = ("norms", "zoo_of_tests:small", "--input", "3,11,13")


class TestNorms:
    def test_json_holds_what_operator_norm_says(self, opnorm_command: Callable[..., Outcome]) -> None:
        report = json.loads(opnorm_command(*SMALL, "--json", "--seed", "3").out)
        model = build_model("zoo_of_tests:small", {}, seed=3)
        expected = opnorm.operators_of(model, (3, 11, 13))
        assert [row["name"] for row in report["layers"]] == [*expected]
        for row, operator in zip(report["layers"], expected.values(), strict=True):
            bound = operator_norm(operator)
            assert row["norm"] == pytest.approx(float(bound), rel=1e-6)
            assert (row["guarantee"], row["method"]) == (bound.guarantee, str(bound.method))
            fields = {name: row[name] for name in operator.geometry.__dataclass_fields__}
            assert ConvGeometry(**fields) == operator.geometry  # the row describes its layer completely

    def test_json_says_how_to_repeat_it(self, opnorm_command: Callable[..., Outcome]) -> None:
        environment = json.loads(opnorm_command(*SMALL, "--json", "--seed", "3").out)["environment"]
        assert environment["command"] == "opnorm norms zoo_of_tests:small --input 3,11,13 --json --seed 3"
        assert environment["seed"] == 3
        assert environment["torch"] == torch.__version__

    def test_the_seed_is_that_of_the_weights(self, opnorm_command: Callable[..., Outcome]) -> None:
        norms = [
            [row["norm"] for row in json.loads(opnorm_command(*SMALL, "--json", "--seed", seed).out)["layers"]]
            for seed in ("1", "1", "2")
        ]
        assert norms[0] == norms[1]
        assert norms[0] != norms[2]

    def test_table(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command(*SMALL)
        assert outcome.code == 0
        assert outcome.err == ""
        lines = outcome.out.splitlines()
        assert lines[0] == "zoo_of_tests:small on 3×11×13, weights as built, seed 0"
        assert " ".join(lines[1].split()) == "layer kind channels kernel stride input norm guarantee method"
        assert re.match(r"0 +dense +3→4 +3×3 +2×2 +11×13 +\d\.\d+ +upper +FourierBound", lines[2])
        assert re.match(r"2 +depthwise +4→4 +3×3 +1×1 +5×6 +\d\.\d+ +upper +FourierBound", lines[3])
        assert lines[-1].startswith("2 layers; the largest norm is ≤")

    @pytest.mark.parametrize("width", [50, 80])
    @pytest.mark.parametrize("more", [(), ("--compare",)])
    def test_a_narrow_table_fits(
        self,
        opnorm_command: Callable[..., Outcome],
        monkeypatch: pytest.MonkeyPatch,
        width: int,
        more: tuple[str, ...],
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = opnorm_command("norms", "ds_resnet34", "--input", "3,32,32", *more).out.splitlines()
        assert max(map(len, lines)) <= width
        if width == 80:
            assert any(re.search(r"depthwise 64, 3×3 on 32×32 +≤ \d", line) for line in lines)

    def test_csv(self, opnorm_command: Callable[..., Outcome]) -> None:
        rows = [*csv.DictReader(io.StringIO(opnorm_command(*SMALL, "--csv", "--compare").out))]
        assert [(row["name"], row["kernel_size"], row["stride"], row["padding"]) for row in rows] == [
            ("0", "3x3", "2x2", "0:0x0:0"),
            ("2", "3x3", "1x1", "0:0x0:0"),
        ]
        assert float(rows[1]["Runkel2021"]) >= float(rows[1]["norm"]) * (1 - 1e-6)
        assert rows[0]["Runkel2021"] == ""  # a dense layer, for which it is not

    def test_compare_shows_differences(self, opnorm_command: Callable[..., Outcome]) -> None:
        report = json.loads(opnorm_command(*SMALL, "--compare", "--json").out)
        depthwise = report["layers"][1]
        ratio = depthwise["compare"]["Runkel2021"]["norm"] / depthwise["norm"]
        text = opnorm_command(*SMALL, "--compare").out
        assert f"{100 * (ratio - 1):+.1f} %" in text
        assert re.search(r"^0 +dense.* – +\d", text, re.MULTILINE)

    def test_output_files(self, opnorm_command: Callable[..., Outcome], folder: Path) -> None:
        with_table = opnorm_command(*SMALL, "--output", "a.json")
        assert "written to a.json" in with_table.out
        assert opnorm_command(*SMALL, "--csv", "--output", "b.txt").out == ""
        rows = json.loads((folder / "a.json").read_text())["layers"]
        table = [*csv.DictReader(io.StringIO((folder / "b.txt").read_text()))]
        assert [row["norm"] for row in rows] == [float(row["norm"]) for row in table]
        assert sorted(path.name for path in folder.glob("*.*")) == ["a.json", "b.txt", "zoo_of_tests.py"]

    def test_guarantee_method_and_dtype(self, opnorm_command: Callable[..., Outcome]) -> None:
        def layers(*more: str) -> list[dict[str, Any]]:
            return json.loads(opnorm_command(*SMALL, "--json", *more).out)["layers"]

        exact = layers("--guarantee", "exact", "--dtype", "float64")
        assert {row["guarantee"] for row in exact} == {"exact"}
        lower = layers("--method", "PowerIteration(eps=1e-3)", "--guarantee", "lower", "--dtype", "float64")
        assert {row["method"] for row in lower} == {str(PowerIteration(eps=1e-3))}
        for low, true, up in zip(lower, exact, layers("--guarantee", "upper", "--dtype", "float64"), strict=True):
            assert low["norm"] <= true["norm"] * (1 + 1e-9)
            assert true["norm"] <= up["norm"] * (1 + 1e-9)

    def test_any_size(self, opnorm_command: Callable[..., Outcome]) -> None:
        for sizes in ((), ("--input", "3,any,any")):
            report = json.loads(opnorm_command("norms", "zoo_of_tests:small", *sizes, "--json").out)
            assert [row["input_size"] for row in report["layers"]] == [[None, None]] * 2

    def test_settings_reach_the_factory(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command(*SMALL, "--arg", "width=7", "--arg", "mode=circular", "--json")
        row = json.loads(outcome.out)["layers"][0]
        assert (row["out_channels"], row["padding_mode"]) == (7, "circular")

    def test_a_method_that_takes_some_layers_only(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command(*SMALL, "--method", "runkel2021")
        assert outcome.code == 0
        assert "no norm: 0: Runkel2021 takes depthwise" in outcome.out
        assert opnorm_command("norms", "zoo_of_tests:small", "--method", "ryu2019").code == 1  # any size: none at all

    def test_one_layer_without_a_norm_does_not_hide_the_others(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command("norms", "zoo_of_tests:not_a_number", "--input", "3,11,13")
        assert outcome.code == 1
        assert "no norm: 0: expected finite weights" in outcome.out
        assert re.search(r"^2 +depthwise.*\d\.\d+ +upper", outcome.out, re.MULTILINE)

    def test_what_is_left_out_is_said(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command("norms", "zoo_of_tests:with_spare", "--input", "3")
        assert "left out: 0.spare: never called by forward" in outcome.out

    def test_an_instance_is_a_model_too(self, opnorm_command: Callable[..., Outcome]) -> None:
        assert "(the model)" in opnorm_command("norms", "zoo_of_tests:Holder.model", "--input", "3").out


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("norms",), "Missing from opnorm norms: MODEL"),
            (("norms", "nothing_built_in"), "expected MODEL as one of ds_convnet"),
            (("norms", "zoo_of_tests.py"), "a checkpoint goes with its model"),
            (("norms", "no_such_package.module:f"), "no module 'no_such_package'"),
            (("norms", "no_such_file.py:f"), "no file no_such_file.py"),
            (("norms", "zoo_of_tests:smal"), "no 'smal'; there are small, Holder"),
            (("norms", "zoo_of_tests:number"), "expected zoo_of_tests:number to be a model or to return one, got int"),
            (("norms", "zoo_of_tests:wrong"), "to return a torch.nn.Module, got int"),
            (("norms", "zoo_of_tests:nothing", "--input", "3"), "got none in zoo_of_tests:nothing"),
            (("norms", "zoo_of_tests:small", "--input", "3,a"), "expected --input as positive sizes"),
            (("norms", "zoo_of_tests:small", "--input", "3,-1,4"), "expected --input as positive sizes"),
            (("norms", "zoo_of_tests:small", "--input", "4,11,13"), "in 0 (Conv2d)"),
            ((*SMALL, "--arg", "width"), "expected --arg KEY=VALUE"),
            ((*SMALL, "--arg", "depth=3"), "(width=4, mode='zeros')"),
            ((*SMALL, "--method", "fft"), "expected --method among auto, Exact, FourierBound"),
            ((*SMALL, "--method", "PowerIteration(eps=-1)"), "the settings of PowerIteration (eps, max_iter, prove)"),
            ((*SMALL, "--method", "PowerIteration(steps=1)"), "the settings of PowerIteration (eps, max_iter, prove)"),
            ((*SMALL, "--guarantee", "tight"), "invalid choice 'tight'"),
            ((*SMALL, "--guarantee", "tight"), "expected one of exact, lower, upper"),
            ((*SMALL, "--seed", "x"), "Error parsing --seed"),
            ((*SMALL, "--jsn"), "perhaps you meant --json"),
            ((*SMALL, "--json", "--csv"), "expected --json or --csv, got both"),
            ((*SMALL, "--output", "a.txt"), "expected --output as a .json or .csv file"),
            ((*SMALL, "--output", "no/such/folder.json"), "in a folder that exists"),
            ((*SMALL, "--device", "gpu"), "expected --device as cpu"),
            ((*SMALL, "--checkpoint", "none.safetensors"), "got none.safetensors, which is not there"),
            (("norm",), "expected a command among norms"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_a_wrong_value_gets_one_line_and_exit_code_2(
        self, opnorm_command: Callable[..., Outcome], arguments: tuple[str, ...], says: str
    ) -> None:
        outcome = opnorm_command(*arguments)
        assert outcome.code == 2
        assert outcome.out == ""
        assert outcome.err.count("\n") == 1
        assert outcome.err.startswith("opnorm")
        assert says in outcome.err

    def test_an_error_inside_the_factory_keeps_its_traceback(self, folder: Path) -> None:
        (folder / "zoo_of_tests.py").write_text("def broken():\n    raise ValueError('from the factory')\n")
        with pytest.raises(ValueError, match="from the factory"):
            main(["norms", "zoo_of_tests:broken"])

    def test_a_module_that_the_factory_lacks_is_not_taken_for_the_factory(self, folder: Path) -> None:
        (folder / "zoo_of_tests.py").write_text("import no_such_thing\n")
        with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
            main(["norms", "zoo_of_tests:model"])

    @pytest.mark.parametrize(("module", "extra"), [("rich", "lab"), ("ray", "sweep")])
    def test_a_missing_extra_gets_a_hint(
        self, opnorm_command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, module: str, extra: str
    ) -> None:
        def lacking(name: str) -> Any:
            raise ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.sub")

        monkeypatch.setattr("importlib.import_module", lacking)
        outcome = opnorm_command("norms", "x")
        assert outcome.code == 1
        assert outcome.err == f'opnorm norms: {module}.sub is not installed; pip install "opnorm[{extra}]"\n'

    def test_ctrl_c(self, opnorm_command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("opnorm.lab.norms.operator_norm", interrupted)
        outcome = opnorm_command(*SMALL)
        assert (outcome.code, outcome.err) == (130, "opnorm norms: interrupted\n")


def made() -> list[list[str]]:
    """The arguments of `opnorm` in the Makefile, in its order."""
    text = (ROOT / "Makefile").read_text().replace("\\\n\t", "")
    return [*map(shlex.split, re.findall(r"^\t\$\(RUN\) -m opnorm (.*)$", text, re.MULTILINE))]


class TestCommand:
    def test_without_arguments_it_says_what_to_do_first(self, opnorm_command: Callable[..., Outcome]) -> None:
        outcome = opnorm_command()
        assert outcome.code == 0
        assert "Start with" in outcome.out
        assert outcome.out == opnorm_command("--help").out
        for name, command in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(command.summary)}$", outcome.out, re.MULTILINE)

    def test_the_first_command_it_suggests_works(self, opnorm_command: Callable[..., Outcome]) -> None:
        line = next(line for line in opnorm_command().out.splitlines() if line.startswith("  opnorm "))
        assert opnorm_command(*line.split()[1:]).code == 0

    @pytest.mark.parametrize("words", EVERY, ids=" ".join)
    def test_help_has_an_example(self, opnorm_command: Callable[..., Outcome], words: tuple[str, ...]) -> None:
        outcome = opnorm_command(*words, "--help")
        assert (outcome.code, outcome.err) == (0, "")
        _, title, examples = outcome.out.partition("For example:")
        assert title
        assert re.search(rf"^\W*opnorm {' '.join(words)}\b", examples, re.MULTILINE)

    @pytest.mark.parametrize("words", EVERY, ids=" ".join)
    def test_an_option_that_there_is_not_gets_one_line(
        self, opnorm_command: Callable[..., Outcome], words: tuple[str, ...]
    ) -> None:
        outcome = opnorm_command(*words, "--no-such-option")
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith(f"opnorm {words[0]}: ")
        assert outcome.err.count("\n") == 1
        assert "--no-such-option" in outcome.err or "Missing" in outcome.err or "expected" in outcome.err

    def test_every_command_in_what_is_said_first_exists(self, opnorm_command: Callable[..., Outcome]) -> None:
        shown = re.findall(r"^  opnorm (\w+) (.*)$", opnorm_command().out, re.MULTILINE)
        assert {"norms", "train", "eval", "certify"} <= {name for name, _ in shown} <= {*COMMANDS}
        for name, rest in shown:
            options = re.findall(r" (--[\w-]+)", f" {rest}")
            text = opnorm_command(name, "--help").out
            assert all(option in text for option in options)

    def test_make_demo_trains_anew_and_evaluates_what_it_has_trained(self) -> None:
        (first, *training), (second, *evaluation), _ = made()
        assert (first, second) == ("train", "eval")
        config = read_config(training)
        assert config.overwrite
        assert cli.parse(Eval, evaluation, "opnorm eval").run == str(config.folder)
        assert f"{config.folder}/{PAGE}" in (ROOT / "Makefile").read_text()

    def test_make_results_is_the_small_profile_of_everything(self) -> None:
        *_, (first, second, *words) = made()
        assert (first, second, words.pop()) == ("reproduce", "all", "$(ARGS)")
        options = cli.parse(Everything, words, "opnorm reproduce all")
        assert options.profile == "small"
        assert (options.data_path, options.weights) == (
            Path("$(DATA)/cifar-10-batches-bin"),
            Path("$(DATA)/weights/mobilenetv2_torchvision_bnfolded.safetensors"),
        )

    def test_a_full_disk_gets_one_line(
        self, opnorm_command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "c.json")

        monkeypatch.setattr("opnorm.lab.certify.write_json", full)
        outcome = opnorm_command("certify", *SMALL[1:], "--samples", "0", "--json", "c.json")
        assert outcome.code == 1
        assert outcome.err == "opnorm certify: [Errno 28] No space left on device: 'c.json'\n"

    def test_version(self, opnorm_command: Callable[..., Outcome]) -> None:
        assert opnorm_command("--version").out == f"opnorm {opnorm.__version__}\n"

    def test_cli_imports_the_standard_library_alone(self) -> None:
        """So that help is quick, and there without the extra."""
        text = Path(cli.__file__).read_text()
        modules = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
        assert {*modules} <= sys.stdlib_module_names

    def test_every_requirement_has_its_extra(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        imported = {
            "pillow": "PIL",
            "scikit-learn": "sklearn",
            "deel-torchlip": "deel",
            "lightning-fabric": "lightning",
            "pyyaml": "yaml",
        }
        for extra, modules in EXTRAS.items():
            names = {re.split(r"[\[<>=]", entry)[0] for entry in project["optional-dependencies"][extra]} - {"opnorm"}
            assert {imported.get(name, name) for name in names} <= {*modules}, extra

    def test_in_a_process_of_its_own(self, folder: Path) -> None:
        """As `python -m opnorm`, its output in a pipe whose reader leaves early, and with a wrong value."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "opnorm"]
        piped = subprocess.Popen(
            [*program, *SMALL, "--json"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert piped.stdout is not None
        assert piped.stderr is not None
        piped.stdout.close()
        assert piped.stderr.read() == b""
        piped.stderr.close()
        assert piped.wait() == 1
        wrong = subprocess.run([*program, "norms", "zoo"], cwd=folder, env=environment, capture_output=True, text=True)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("opnorm norms: expected MODEL")


class TestArguments:
    def test_shapes(self) -> None:
        assert read_shapes(["3,224,224", "3x7x any", "5"]) == [(3, 224, 224), (3, 7, None), (5,)]

    @pytest.mark.parametrize("name", METHODS)
    def test_every_method_by_name_and_by_what_results_call_it(self, name: str) -> None:
        method = read_method(name.lower())
        assert type(method) is METHODS[name]
        assert read_method(str(method)) == method

    @pytest.mark.parametrize("text", ["Exact(__import__('os'))", "Exact(rtol=__import__('os'))", "print", "Exact(", ""])
    def test_a_method_is_never_evaluated(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"expected (--method among|the settings)"):
            read_method(text)

    def test_settings(self) -> None:
        texts = ["a=1", "b=0.5", "c=mean", "d=(1, 2)", "e=None", "f=x=y", "g="]
        assert read_settings(texts) == {"a": 1, "b": 0.5, "c": "mean", "d": (1, 2), "e": None, "f": "x=y", "g": ""}


class Malicious:
    """Unpickling it would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it_ran",)


class TestCheckpoint:
    @pytest.fixture
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    @pytest.mark.parametrize("suffix", ["safetensors", "pt"])
    def test_weights_arrive(self, model: nn.Module, folder: Path, suffix: str) -> None:
        from safetensors.torch import save_file

        path = folder / f"weights.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(model.state_dict(), path)
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        load_checkpoint(other, path)
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
    @pytest.mark.parametrize("key", [None, "state_dict", "model"])
    def test_what_training_scripts_save(self, model: nn.Module, folder: Path, prefix: str, key: str | None) -> None:
        state = {prefix + name: value for name, value in model.state_dict().items()}
        torch.save(state if key is None else {key: state, "epoch": 7}, folder / "checkpoint.pt")
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        load_checkpoint(other, folder / "checkpoint.pt")
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_reaches_the_norms(self, opnorm_command: Callable[..., Outcome], folder: Path) -> None:
        model = build_model("zoo_of_tests:small", {}, seed=0)
        with torch.no_grad():
            model[0].weight.zero_()
        torch.save(model.state_dict(), folder / "zero.pt")
        outcome = opnorm_command(*SMALL, "--checkpoint", "zero.pt", "--json")
        assert json.loads(outcome.out)["layers"][0]["norm"] == 0.0
        assert "weights of zero.pt" in opnorm_command(*SMALL, "--checkpoint", "zero.pt").out

    def test_missing_and_unexpected_names(self, model: nn.Module, folder: Path) -> None:
        state = model.state_dict()
        state["extra.weight"] = state.pop("0.weight")
        torch.save(state, folder / "other.pt")
        with pytest.raises(UsageError, match=r"missing: 0\.weight; not in the model: extra\.weight"):
            load_checkpoint(model, folder / "other.pt")

    def test_wrong_sizes(self, model: nn.Module, folder: Path) -> None:
        torch.save(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).state_dict(), folder / "large.pt")
        with pytest.raises(UsageError, match=r"does not fit the model: size mismatch for 0\.weight.* and 2 more"):
            load_checkpoint(model, folder / "large.pt")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_code_in_a_checkpoint_is_not_run(self, model: nn.Module, folder: Path, zipped: bool) -> None:
        state = {**model.state_dict(), "payload": Malicious()}
        if zipped:
            torch.save(state, folder / "evil.pt")
        else:
            (folder / "evil.pt").write_bytes(pickle.dumps(state, protocol=2))
        with pytest.raises(UsageError, match=r"tensors alone.*not loaded, since that could run code"):
            load_checkpoint(model, folder / "evil.pt")
        assert not (folder / "it_ran").exists()

    @pytest.mark.parametrize("name", ["cut.safetensors", "cut.pt", "empty.safetensors", "empty.pt", "text.pt"])
    def test_files_that_are_no_checkpoint(self, model: nn.Module, folder: Path, name: str) -> None:
        from safetensors.torch import save_file

        path = folder / name
        (save_file if path.suffix == ".safetensors" else torch.save)(model.state_dict(), path)
        kept = {"cut": path.read_bytes()[:-100], "empty": b"", "text": b"not a checkpoint"}
        path.write_bytes(kept[path.stem])
        with pytest.raises(UsageError, match=f"expected a checkpoint.*{re.escape(name)}"):
            load_checkpoint(model, path)

    @pytest.mark.parametrize("content", [torch.zeros(3), {"epoch": 7}, [torch.zeros(3)], {}])
    def test_files_without_a_state_dict(self, model: nn.Module, folder: Path, content: Any) -> None:
        torch.save(content, folder / "other.pt")
        with pytest.raises(UsageError, match="expected a state dict"):
            load_checkpoint(model, folder / "other.pt")


class TestRecord:
    def test_environment_is_json_and_names_the_commit(self) -> None:
        environment = json.loads(record.json_text(record.environment(["norms", "a b"], seed=7)))
        assert environment["command"] == "opnorm norms 'a b'"
        assert {"python", "torch", "platform", "opnorm", "commit", "threads", "date"} <= environment.keys()

    def test_commit_is_that_of_the_source(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And, since it is asked of git for the source itself, not that of the folder one works in."""
        monkeypatch.delenv("OPNORM_COMMIT", raising=False)
        command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
        git = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
        if git is None or git.returncode:
            assert record.commit() is None
        else:
            assert (record.commit() or "").removesuffix("+changes") == git.stdout.strip()

    @pytest.mark.parametrize(("status", "commit"), [("", "abc"), (" M file", "abc+changes"), (None, "abc+changes")])
    def test_a_commit_is_called_clean_only_where_git_says_so(
        self, status: str | None, commit: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None: it did not answer in time."""
        answers = {"ls-files": "record.py", "rev-parse": "abc", "status": status}
        monkeypatch.setattr(record, "_git", lambda *arguments, at: answers[arguments[0]])
        assert record.commit() == commit

    def test_a_copy_inside_another_checkout_has_no_commit(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a virtual environment inside somebody's repository."""
        if shutil.which("git"):  # without it, there is none anyway
            subprocess.run(["git", "init", "-q", folder], check=True)
        copy = folder / "site-packages" / "record.py"
        copy.parent.mkdir()
        copy.write_text("")
        monkeypatch.setattr(record, "__file__", str(copy))
        monkeypatch.delenv("OPNORM_COMMIT", raising=False)
        assert record.commit() is None
        monkeypatch.setenv("OPNORM_COMMIT", "abc")
        assert record.commit() == "abc"

    def test_json_of_everything(self) -> None:
        @dataclass
        class Point:
            x: float
            where: Path

        results = {
            "tensor": torch.arange(3),
            "scalar": torch.tensor(0.5),
            "dtype": torch.float64,
            "point": Point(math.nan, Path("a")),
            "sizes": ((1, None), {2}),
            "bounds": [math.inf, -math.inf],
            "text": "a [\n 1\n] b",
            5: True,
        }
        assert json.loads(record.json_text(results)) == {
            "tensor": [0, 1, 2],
            "scalar": 0.5,
            "dtype": "torch.float64",
            "point": {"x": "nan", "where": "a"},
            "sizes": [[1, None], [2]],
            "bounds": ["inf", "-inf"],
            "text": "a [\n 1\n] b",
            "5": True,
        }

    def test_short_lists_take_one_line(self) -> None:
        assert (
            record.json_text({"a": [1, 2.5, None], "b": ["x"]}) == '{\n "a": [1, 2.5, null],\n "b": [\n  "x"\n ]\n}\n'
        )

    def test_writes_through_folders_that_do_not_exist(self, folder: Path) -> None:
        record.write_json(folder / "a" / "b.json", {"x": 1})
        assert json.loads((folder / "a" / "b.json").read_text()) == {"x": 1}

    def test_a_full_disk_leaves_the_old_file(self, folder: Path) -> None:
        """A limit on file sizes stops the write half-way, as a full disk does."""
        record.write_json("results.json", {"old": True})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
            with pytest.raises(OSError, match="File too large") as caught:
                record.write_json("results.json", {"new": "x" * 100_000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.errno == errno.EFBIG
        assert json.loads((folder / "results.json").read_text()) == {"old": True}
        assert [path.name for path in folder.glob("*json*")] == ["results.json"]

    def test_a_kill_before_the_end_leaves_the_old_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def killed(*_: Any) -> None:
            raise SystemExit

        record.write_json("results.json", {"old": True})
        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            record.write_json("results.json", {"new": True})
        assert json.loads((folder / "results.json").read_text()) == {"old": True}


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "guarantee", "text"),
        [
            (1.000001, "upper", "1.0001"),
            (1.999999, "lower", "1.9999"),
            (1.999999, "exact", "2.0000"),
            (0.0, "exact", "0.0000"),
            (1.23456789e-12, "upper", "1.2346e-12"),
            (123456.7, "upper", "1.2346e+05"),
            (math.inf, "upper", "inf"),
            (None, None, "–"),
        ],
    )
    def test_are_rounded_to_the_side_of_their_guarantee(
        self, value: float | None, guarantee: str | None, text: str
    ) -> None:
        assert number_text(value, guarantee) == text

    def test_signs(self) -> None:
        assert [number_text(1.0, kind, sign=True)[0] for kind in ("exact", "upper", "lower", "none")] == [*"=≤≥≈"]


def test_an_operator_of_every_layer_kind_is_described(opnorm_command: Callable[..., Outcome], folder: Path) -> None:
    """The narrow geometry column, which leaves out what goes without saying."""
    from opnorm.lab.norms import _described
    from opnorm.lab.norms_table import _geometry

    cases = {
        "depthwise 4, 3×3/2 on 7×5": ConvGeometry(4, 4, 3, (7, 5), stride=2, padding=1, groups=4),
        "dense 3→5, 3×1/2×1 on 7×5": ConvGeometry(3, 5, (3, 1), (7, 5), stride=(2, 1)),
        "pointwise 3→5 on 7×any": ConvGeometry(3, 5, (1, 1), (7, None)),
        "linear 3→5": ConvGeometry(3, 5, (), ()),
        "groupedᵀ 4→8, 2 on 7": ConvGeometry(4, 8, 2, 7, groups=2, transposed=True),
    }
    assert [_geometry(_described(geometry)) for geometry in cases.values()] == [*cases]
    assert all(ConvOperator(g, torch.zeros(g.weight_shape)) for g in cases.values())
