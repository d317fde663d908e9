"""`opnorm train`: what is trained, what is written, and how a run goes on, stops and fails."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("tyro", reason="the extra lab is not installed")

from safetensors.torch import load_file

import opnorm
from opnorm.lab import checkpoint, train_loop
from opnorm.lab.cli import UsageError, main
from opnorm.lab.data import load_data
from opnorm.lab.train_config import Train, from_dict, read_config
from opnorm.lab.train_log import scalars_of
from opnorm.lab.train_loop import Progress
from opnorm.lab.train_model import Standardize, build_network, build_optimizer, learning_rate
from opnorm.lab.train_report import certified, confusion_figure, curves_figure
from opnorm.lab.train_show import Screen, clock
from opnorm.models import build
from outcome import Command, Outcome

TINY = ("--arg", "width=5", "--batch-size", "257", "--epochs", "2", "--device", "cpu")  # six steps an epoch
MODELS = """
import torch
from torch import nn

def noisy():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 17), nn.Dropout(0.5), nn.ReLU(), nn.Linear(17, 10))

class Squared(nn.Sequential):
    def forward(self, x):
        return super().forward(x) ** 2

def without_bound():
    return Squared(nn.Flatten(), nn.Linear(64, 10))

def nine():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`opnorm train` in a folder of its own, with a tiny network."""
    (tmp_path / "zoo.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*argv: str, tiny: bool = True) -> Outcome:
        code = main(["train", *(TINY if tiny else ()), *argv])
        return Outcome(code, *capsys.readouterr())

    return run


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, how: Callable[[], Any]) -> None:
    """Have something happen after a step of the next run, once."""
    stepped = Screen.stepped

    def then(self: Screen, progress: Progress, images: int) -> None:
        stepped(self, progress, images)
        if progress.step == step:
            monkeypatch.setattr(Screen, "stepped", stepped)
            how()

    monkeypatch.setattr(Screen, "stepped", then)


def weights(folder: str) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


def result(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return content


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            (
                "paper-cifar10",
                {
                    "model": "ds_resnet34", "data": "cifar10", "optimizer": "sgd", "momentum": 0.9, "epochs": 300,
                    "schedule": "milestones", "milestones": (150, 250), "batch_size": 128, "eps": 0.01, "s_init": 3.0,
                    "logit_scale": 1.0, "weight_decay": 0.0, "normalize": True,
                },
            ),
            (
                "paper-imagenet",
                {
                    "model": "mobilenet_v2", "data": "imagenet", "optimizer": "sgd", "momentum": 0.9, "epochs": 150,
                    "milestones": (50, 100), "batch_size": 128, "eps": 0.01, "scaling": "soft", "logit_scale": 1.0,
                },
            ),
        ],
    )  # fmt: skip
    def test_presets_are_the_tables_of_appendix_b(self, name: str, settings: dict[str, Any]) -> None:
        config = read_config(["--preset", name])
        assert {key: getattr(config, key) for key in settings} == settings

    @pytest.mark.parametrize(
        ("K", "lr", "s"), [(10, 1e-3, 3), (12, 1e-3, 3), (15, 1e-3, 3), (20, 5e-4, 3), (30, 5e-4, 0.5), (40, 3e-4, 0.5)]
    )
    def test_imagenet_has_a_learning_rate_for_each_K(self, K: int, lr: float, s: float) -> None:
        config = read_config(["--preset", "paper-imagenet", "--K", str(K)])
        assert (config.K, config.lr, config.s_init) == (K, lr, s)
        assert read_config(["--preset", "paper-imagenet", "--K", str(K), "--lr", "0.3"]).lr == 0.3

    def test_what_is_given_overrides_the_preset(self) -> None:
        config = read_config(["--preset", "paper-cifar10", "--K", "7", "--epochs", "11", "--scaling", "soft"])
        assert (config.K, config.epochs, config.scaling, config.batch_size) == (7.0, 11, "soft", 128)

    def test_another_schedule_leaves_out_the_milestones_of_the_preset(self) -> None:
        config = read_config(["--preset", "paper-cifar10", "--schedule", "onecycle"])
        assert (config.schedule, config.milestones) == ("onecycle", ())

    def test_settings_survive_json(self) -> None:
        argv = [
            "--preset",
            "paper-imagenet",
            "--out",
            "a",
            "--data-path",
            "b",
            "--K-per",
            "joint",
            "--radii",
            "0.5",
            "--arg",
            "x=1",
        ]
        config = read_config(argv)
        assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
        with pytest.raises(UsageError, match="got others: newer"):
            from_dict(config.to_dict() | {"newer": 1})

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--epochs", "0"], "expected --epochs of at least 1, got 0"),
            (["--batch-size", "-3"], "expected --batch-size of at least 1"),
            (["--K", "0"], "expected --K above 0"),
            (["--K", "inf"], "expected --K above 0 and finite, got inf"),
            (["--lr", "nan"], "expected --lr above 0 and finite, got nan"),
            (["--momentum", "-1"], "expected --momentum of at least 0"),
            (["--radii", "-1"], "expected --radii of at least 0"),
            (["--milestones", "3"], "expected --milestones with --schedule milestones"),
            (["--image-size", "4"], "expected --image-size of at least 8"),
            (["--no-normalize", "--K-per", "pair"], "expected --K-per without --no-normalize"),
            (["--data", "mnist"], "expected one of"),
            (["--scaling", "firm"], "expected one of cap, hard, soft"),
            (["--epoch", "3"], "perhaps you meant --epochs"),
            (["--model", "resnet"], "expected MODEL as one of ds_convnet"),
            (["--model", "zoo.py:nine"], "expected a model with 10 logits an image, (2, 10) for two, got (2, 9)"),
            (["--model", "ds_resnet34", "--arg", "in_channels=3"], "expected a model for images of 1×8×8"),
            (["--arg", "depth=1", "--arg", "in_channels=3"], "expected a model for images of 1×8×8"),
            (["--K-per", "pair", "--model", "zoo.py:noisy"], "expected --K-per layer for zoo.py:noisy"),
            (["--data-path", "nowhere", "--data", "cifar10"], "got nowhere"),
            (["--resume", "nowhere"], "expected --resume with the folder of a run, got nowhere"),
        ],
    )
    def test_wrong_values_get_one_line(self, train: Command, argv: list[str], words: str) -> None:
        outcome = train(*argv, tiny=False)
        assert outcome.code == 2
        assert outcome.err.startswith("opnorm train: ")
        assert outcome.err.count("\n") == 1
        assert words in outcome.err
        assert not Path("runs").exists()

    def test_a_gpu_that_is_not_there_is_refused(self, train: Command) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        assert "expected --device that torch sees here, got cuda" in train("--device", "cuda").err

    def test_help_shows_the_defaults_of_the_preset(self, train: Command) -> None:
        def shown(outcome: Outcome) -> str | None:
            found = re.search(r"--epochs INT [^(]*\(default: (\d+)\)", outcome.out)
            return found and found[1]

        assert shown(train("--help", tiny=False)) == "60"
        assert shown(train("--preset", "paper-cifar10", "--help", tiny=False)) == "300"


class TestLearningRate:
    def test_milestones_divide_by_ten(self) -> None:
        config = Train(schedule="milestones", milestones=(2, 3), lr=0.5, epochs=5)
        rates = [learning_rate(config, step, 7) for step in range(35)]
        assert rates == pytest.approx([0.5] * 14 + [0.05] * 7 + [0.005] * 14, rel=1e-12)

    def test_one_cycle_rises_and_falls(self) -> None:
        config = Train(schedule="onecycle", lr=0.5, epochs=5)
        rates = [learning_rate(config, step, 20) for step in range(100)]
        peak = rates.index(max(rates))
        assert (rates[0], peak, rates[30]) == (pytest.approx(0.5 / 25), 30, 0.5)
        assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
        assert rates[-1] < 0.5 * 1e-2

    def test_constant_is_constant_and_one_step_is_enough(self) -> None:
        assert {learning_rate(Train(schedule="constant", lr=0.3), step, 3) for step in range(9)} == {0.3}
        assert 0 < learning_rate(Train(epochs=1, lr=0.3), 0, 1) < 0.3


class TestNetwork:
    def config(self, **changes: Any) -> Train:
        return Train(arg=("width=5",), device="cpu", **changes)

    @pytest.mark.parametrize("K", [0.7, 3.0])
    def test_K_bounds_what_it_is_said_to_bound(self, K: float) -> None:
        data, device = load_data("digits"), torch.device("cpu")
        norms = {}
        for per in ("pair", "joint", "layer"):
            network = build_network(self.config(K=K, K_per=per), data, device)
            assert network.normalizer is not None
            norms[per] = {name: float(norm) for name, norm in network.normalizer.norms().items()}
        pairs = [norm for name, norm in norms["joint"].items() if "→" in name]
        assert len(pairs) == 1  # the first depthwise layer has 16 kernels a channel, and is bounded by itself
        each = [norm / (K if name == "5" else math.sqrt(K)) for name, norm in norms["pair"].items()]
        for ratio in (*each, *(norm / K for norm in (*norms["layer"].values(), *pairs))):
            assert 0.93 < ratio < 1.011  # on images this small the bound of a depthwise layer is some percent above

    def test_pairs_are_the_default_where_there_are_any(self, tmp_path: Path) -> None:
        (tmp_path / "zoo.py").write_text(MODELS)
        data, device = load_data("digits"), torch.device("cpu")
        assert build_network(self.config(), data, device).K_per == "pair"
        plain = Train(model=f"{tmp_path / 'zoo.py'}:noisy")
        assert build_network(plain, data, device).K_per == "layer"

    @pytest.mark.parametrize("scaling", ["hard", "soft", "cap"])
    def test_the_plain_network_is_the_same_function(self, scaling: Any) -> None:
        data = load_data("digits")
        network = build_network(self.config(scaling=scaling, K=2.0), data, torch.device("cpu"))
        x = torch.rand(7, 1, 8, 8)
        plain = network.plain()
        torch.testing.assert_close(plain(x), network.model(x), rtol=1e-6, atol=1e-6)
        assert type(plain[0].depthwise) is nn.Conv2d  # type: ignore[index, union-attr]
        assert not any("parametrizations" in name for name in plain.state_dict())
        torch.testing.assert_close(network.model(x), plain(x), rtol=1e-6, atol=1e-6)  # the model is as it was

    def test_scales_do_not_decay(self) -> None:
        data = load_data("digits")
        config = self.config(scaling="soft", weight_decay=0.1, s_init=2.0, K=3.0, K_per="layer")
        network = build_network(config, data, torch.device("cpu"))
        decayed, kept = build_optimizer(config, network).param_groups
        assert (decayed["weight_decay"], kept["weight_decay"], len(kept["params"])) == (0.1, 0.0, 5)
        assert len(decayed["params"]) == 5 + 3  # weights and biases
        assert network.scales() == pytest.approx(dict.fromkeys(network.normalizer.layers, 3 * math.tanh(2.0)))  # type: ignore[union-attr]

    def test_standardize_is_what_the_batches_have(self) -> None:
        odd = Standardize((0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
        got = odd(torch.full((1, 3, 2, 2), 0.6))
        torch.testing.assert_close(got[0, :, 0, 0], torch.tensor([1.0, 1.6, 0.3]))


class TestRun:
    def test_what_a_run_leaves_is_true(self, train: Command) -> None:
        """The weights that are left have the accuracy, the norms and the certificate that are reported."""
        outcome = train("--out", "run", "--K", "2", "--radii", "0", "0.001", "0.3")
        assert outcome.code == 0, outcome.err
        found = result("run")
        model = build("ds_convnet", width=5).eval()
        model.load_state_dict(load_file("run/model.safetensors"))
        data = load_data("digits")
        x, y = next(data.test_batches(1000, torch.device("cpu")))
        predicted = model(x).argmax(1)
        assert found["test_accuracy"] == pytest.approx(float((predicted == y).double().mean()))
        confusion = torch.tensor(found["confusion"])
        assert torch.equal(confusion.sum(1), y.bincount())
        assert torch.equal(confusion.sum(0), predicted.bincount(minlength=10))
        certificate = opnorm.certify(model, (1, 8, 8), lower=False)
        assert found["bound"] == pytest.approx(certificate.bound, rel=1e-6)
        radii = certificate.certified_accuracy(model, [(x, y)], (0, 0.001, 0.3))
        assert {float(k): v for k, v in found["certified_accuracy"].items()} == pytest.approx(radii)
        assert found["certified_accuracy"]["0.0"] == found["test_accuracy"]
        layers = opnorm.operators_of(model, (1, 8, 8))
        for name in ("0.depthwise", "0.pointwise", "5"):
            layer = layers[name].detach()
            exact = opnorm.operator_norm(layer, guarantee="exact")
            divided_by = exact if layer.geometry.kind != "depthwise" else opnorm.FourierBound().compute(layer)
            assert found["norms"][name] == pytest.approx(float(exact), rel=0.011)
            assert float(divided_by) == pytest.approx(2 if name == "5" else math.sqrt(2), rel=0.011)
        assert f"test accuracy {found['test_accuracy']:.2%} on 364 images" in outcome.out
        assert "certified accuracy at radius 0.3:" in outcome.out
        assert found["environment"]["command"].startswith("opnorm train ")
        assert from_dict(found["config"]).K == 2.0

    def test_the_log_has_a_line_an_epoch_and_tensorboard_the_same(self, train: Command) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert train("--out", "run", "--scaling", "soft").code == 0
        lines = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
        assert [(line["epoch"], line["step"]) for line in lines] == [(1, 6), (2, 12)]
        assert lines == result("run")["history"]
        assert {"lr", "train_loss", "test_accuracy", "norms", "scales", "bound", "normalizing_seconds"} <= {*lines[0]}
        events = EventAccumulator("run")
        events.Reload()
        assert {"accuracy/test", "loss/train", "lr", "norms/5", "scales/0.pointwise", "bound"} <= {
            *events.Tags()["scalars"]
        }
        for event, line in zip(events.Scalars("accuracy/test"), lines, strict=True):
            assert (event.step, event.value) == (line["step"], pytest.approx(line["test_accuracy"]))

    def test_curves_and_confusion_are_pictures(self, train: Command) -> None:
        from PIL import Image

        assert train("--out", "run").code == 0
        for name in ("curves.png", "confusion.png"):
            with Image.open(Path("run") / name) as image:
                assert image.width > 300

    def test_the_seed_decides(self, train: Command) -> None:
        for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
            assert train("--out", name, "--seed", seed, "--epochs", "1").code == 0
        assert weights("a") == weights("b") != weights("c")

    def test_plain_training_leaves_norms_alone(self, train: Command) -> None:
        outcome = train("--no-normalize", "--out", "run", "--logit-scale", "1", "--epochs", "1")
        assert outcome.code == 0
        assert "no normalisation" in outcome.out
        found = result("run")
        assert "norms" not in found
        assert found["bound"] > 2

    def test_mixed_precision_trains(self, train: Command) -> None:
        assert train("--precision", "bf16", "--out", "run").code == 0
        assert result("run")["history"][-1]["test_accuracy"] > 0.3

    def test_a_network_without_a_certificate_is_trained_all_the_same(self, train: Command) -> None:
        outcome = train(
            "--model", "zoo.py:without_bound", "--out", "run", "--epochs", "1", "--arg", "width=5", tiny=False
        )
        assert outcome.code == 2  # the factory has no width
        outcome = train("--model", "zoo.py:without_bound", "--out", "run", "--epochs", "1", tiny=False)
        assert outcome.code == 0, outcome.err
        assert re.search(r"^no certificate: expected operations .* pow", outcome.out, re.MULTILINE), outcome.out
        assert result("run")["bound"] is None

    def test_images_in_folders_are_trained_on(self, train: Command) -> None:
        from PIL import Image

        for i, colour in enumerate(((220, 30, 30), (30, 30, 220))):
            Path(f"pictures/{i}").mkdir(parents=True)
            for j in range(10):
                Image.new("RGB", (20 + j, 17), colour).save(f"pictures/{i}/{j}.png")
        outcome = train(
            "--data", "folder", "--data-path", "pictures", "--image-size", "8", "--batch-size", "4", "--out", "run",
            "--workers", "2", "--logit-scale", "8", "--epochs", "4",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert result("run")["test_accuracy"] == 1.0
        assert "no test folder" in outcome.out


class TestGoingOn:
    @pytest.mark.parametrize(
        ("step", "settings"),
        [
            (4, ("--optimizer", "sgd", "--scaling", "soft", "--lr", "0.01")),
            (6, ("--optimizer", "adam")),  # the last of an epoch, which is evaluated afterwards
            (9, ("--K-per", "joint", "--precision", "bf16")),
            (8, ("--model", "zoo.py:noisy", "--arg", "none")),
        ],
    )
    def test_a_run_that_was_stopped_ends_in_the_same_weights(
        self, train: Command, monkeypatch: pytest.MonkeyPatch, step: int, settings: tuple[str, ...]
    ) -> None:
        tiny = "noisy" not in str(settings)
        settings = settings if tiny else (*settings[:2], "--batch-size", "257", "--epochs", "2")
        assert train(*settings, "--out", "whole", tiny=tiny).code == 0
        stop_at(step, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        outcome = train(*settings, "--out", "parts", tiny=tiny)
        assert outcome.code == 128 + signal.SIGTERM
        assert f"stopped by SIGTERM in step {step}; opnorm train --resume parts goes on" in outcome.out
        assert not Path("parts/result.json").exists()
        torch.manual_seed(12345)
        outcome = train("--resume", "parts", tiny=False)
        assert outcome.code == 0, outcome.err
        assert f"going on after step {step} of 12" in outcome.out
        assert weights("parts") == weights("whole")
        for record, expected in zip(result("parts")["history"], result("whole")["history"], strict=True):
            for key in ("step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "scales"):
                assert record[key] == expected[key]

    def test_ctrl_c_saves_and_says_how_to_go_on(self, train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        handler = signal.getsignal(signal.SIGINT)
        stop_at(3, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
        outcome = train("--out", "run")
        assert outcome.code == 130
        assert "opnorm train --resume run goes on" in outcome.out
        assert checkpoint.load(Path("run/checkpoint.pt"))["progress"]["step"] == 3
        assert signal.getsignal(signal.SIGINT) is handler

    def test_a_signal_while_the_end_is_saved_is_not_lost(self, train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        save = checkpoint.save

        def interrupted(*arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            save(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", interrupted)
            assert train("--out", "run", "--checkpoint-every", "9999").code == 128 + signal.SIGTERM
        assert not Path("run/result.json").exists()
        assert train("--resume", "run", tiny=False).code == 0
        assert len(result("run")["history"]) == 2

    def test_a_second_ctrl_c_does_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signals = train_loop.Signals()
        with signals:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # the same one, from the terminal and from torchrun
            assert signals.received == signal.SIGINT
            monkeypatch.setattr(train_loop, "SAME", 0.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    def test_a_crash_loses_what_came_after_the_last_checkpoint_alone(
        self, train: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert train("--out", "whole").code == 0

        def crash() -> None:
            raise SystemExit(9)

        stop_at(8, monkeypatch, crash)
        assert train("--out", "parts", "--checkpoint-every", "0").code == 9
        assert checkpoint.load(Path("parts/checkpoint.pt"))["progress"]["step"] == 7
        assert train("--resume", "parts", tiny=False).code == 0
        assert weights("parts") == weights("whole")
        assert len(Path("parts/log.jsonl").read_text().splitlines()) == 2

    def test_without_a_checkpoint_it_begins_again(self, train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        def crash() -> None:
            raise SystemExit(9)

        stop_at(2, monkeypatch, crash)
        assert train("--out", "parts", "--checkpoint-every", "9999").code == 9
        assert not Path("parts/checkpoint.pt").exists()
        assert train("--resume", "parts", tiny=False).code == 0
        assert train("--out", "whole").code == 0
        assert weights("parts") == weights("whole")

    def test_a_finished_run_is_reported_again(self, train: Command) -> None:
        assert train("--out", "run", "--epochs", "1").code == 0
        before = weights("run")
        outcome = train("--resume", "run", tiny=False)
        assert outcome.code == 0
        assert weights("run") == before
        assert "test accuracy" in outcome.out

    def test_a_result_names_the_commit_that_began_it_and_others(
        self, train: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def commit(name: str) -> None:
            for module in ("record", "train"):
                monkeypatch.setattr(f"opnorm.lab.{module}.commit", lambda: name)

        commit("first")
        assert train("--out", "whole", "--epochs", "1").code == 0
        assert result("whole")["environment"] == json.loads(Path("whole/config.json").read_text())["environment"]
        assert not {"resumed", "ended"} & result("whole").keys()
        stop_at(3, monkeypatch, lambda: commit("third"))  # the files change, and not the code that runs
        assert train("--out", "moved", "--epochs", "1").code == 0
        assert (result("moved")["environment"]["commit"], result("moved")["ended"]) == ("first", {"commit": "third"})
        stop_at(4, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--out", "parts").code == 128 + signal.SIGTERM
        for name in ("third", "third", "second"):
            commit(name)
            assert train("--resume", "parts", tiny=False).code == 0
        found = result("parts")
        assert "opnorm train --arg" in found["environment"]["command"] and found["environment"]["commit"] == "third"
        assert [e["commit"] for e in found["resumed"]] == ["second"] and "ended" not in found
        assert "--resume parts" in found["resumed"][0]["command"]

    def test_settings_of_a_run_cannot_change(self, train: Command) -> None:
        assert train("--out", "run", "--epochs", "1").code == 0
        outcome = train("--resume", "run", "--lr", "0.5", "--K-per", "layer", tiny=False)
        assert outcome.code == 2
        assert "got another --K-per, --lr" in outcome.err
        assert train("--resume=run", "--workers", "2", tiny=False).code == 0

    def test_a_folder_with_a_run_is_not_overwritten_unasked(self, train: Command) -> None:
        assert train("--out", "run", "--epochs", "1").code == 0
        before = weights("run")
        outcome = train("--out", "run", "--epochs", "1", "--seed", "5")
        assert outcome.code == 2
        assert "--resume run goes on with it, --overwrite begins again" in outcome.err
        assert weights("run") == before
        assert train("--out", "run", "--epochs", "1", "--seed", "5", "--overwrite").code == 0
        assert weights("run") != before
        assert len([*Path("run").glob("events.out.*")]) == 1

    def test_runs_are_named_after_their_settings(self) -> None:
        names = {
            read_config(argv).folder for argv in ([], ["--K", "2"], ["--lr", "1"], ["--seed", "1"], ["--no-normalize"])
        }
        assert len(names) == 5
        assert Path("runs/ds_convnet-digits-K1-hard-adam0.005-seed0") in names


class TestDivergence:
    def test_a_loss_that_is_no_number_is_a_result(self, train: Command) -> None:
        outcome = train(
            "--no-normalize", "--optimizer", "sgd", "--lr", "1e30", "--schedule", "constant", "--out", "run"
        )
        assert outcome.code == 3
        assert re.search(r"^diverged: (the loss is|weights are) (nan|inf|NaN)", outcome.out, re.MULTILINE)
        found = result("run")
        assert found["status"] == "diverged"
        assert "step" in found["reason"]
        assert not Path("run/model.safetensors").exists()

    def test_weights_without_a_norm_are_divergence(self, train: Command) -> None:
        outcome = train(
            "--optimizer", "sgd", "--lr", "1e38", "--schedule", "constant", "--out", "run", "--logit-scale", "1e6"
        )
        assert outcome.code == 3
        assert "diverged:" in outcome.out

    def test_a_network_at_chance_is_given_up_in_the_end(self, train: Command) -> None:
        still = ("--lr", "1e-30", "--schedule", "constant", "--epochs", "9", "--out")
        outcome = train(*still, "run", "--patience", "3")
        assert outcome.code == 3
        assert "for 3 epochs the test accuracy has been that of chance" in outcome.out
        assert len(result("run")["history"]) == 3
        assert Path("run/curves.png").exists()

    def test_patience_can_be_without_end(self, train: Command) -> None:
        outcome = train("--lr", "1e-30", "--schedule", "constant", "--epochs", "3", "--out", "run", "--patience", "0")
        assert outcome.code == 0


class TestFullDisk:
    def test_training_goes_on_when_a_checkpoint_cannot_be_written(
        self, train: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save, tries = checkpoint.save, []

        def full_after_two(path: Path, content: Any) -> None:
            tries.append(path)
            if len(tries) > 2:
                raise OSError(28, "No space left on device")
            save(path, content)

        monkeypatch.setattr(checkpoint, "save", full_after_two)
        outcome = train("--out", "run", "--checkpoint-every", "0")
        assert outcome.code == 0
        assert (
            "the checkpoint could not be written: [Errno 28] No space left on device; the last one is kept"
            in outcome.out
        )
        assert checkpoint.load(Path("run/checkpoint.pt"))["progress"]["step"] == 2

    def test_results_that_cannot_be_written_end_with_1(self, train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("opnorm.lab.train_report.write_bytes", full)
        outcome = train("--out", "run", "--epochs", "1")
        assert outcome.code == 1
        assert outcome.err == "opnorm train: [Errno 28] No space left on device; what was saved before is in run\n"
        assert checkpoint.load(Path("run/checkpoint.pt"))["progress"]["epoch"] == 1


class TestPieces:
    def test_certified_counts_right_and_far_from_the_border(self) -> None:
        logits = torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
        labels = torch.tensor([0, 0, 0, 0])
        certificate = opnorm.certify(nn.Linear(3, 2).double().requires_grad_(False), (3,), lower=False)
        unit = type(certificate)(1.0, None, (), 2.0, (3,), "merged", 1.0, "x")
        assert certified(unit, logits, labels, (0, 0.5, 1.0, 4.0)) == {0: 0.75, 0.5: 0.5, 1.0: 0.25, 4.0: 0.0}

    def test_tags_group_what_belongs_together(self) -> None:
        record = {
            "epoch": 1,
            "step": 2,
            "train_loss": 3,
            "test_accuracy": 0.5,
            "norms": {"a.b": 2.0},
            "no_bound": "x",
            "lr": 1,
        }
        assert scalars_of(record) == {"loss/train": 3.0, "accuracy/test": 0.5, "norms/a.b": 2.0, "lr": 1.0}

    def test_figures_take_any_history(self) -> None:
        record = {"epoch": 1, "train_loss": 1.0, "test_loss": 1.0, "train_accuracy": 0.5, "test_accuracy": 0.5}
        assert len(curves_figure([record]).axes) == 2
        assert len(curves_figure([record | {"bound": 3.0}, record]).axes) == 3
        texts = confusion_figure([[3, 1], [0, 0]], ("a", "b")).axes[0].texts
        assert [text.get_text() for text in texts] == ["3", "1"]

    @pytest.mark.parametrize(
        ("seconds", "text"), [(0, "0:00"), (59.2, "1:00"), (61, "1:01"), (3599, "59:59"), (3723, "1:02:03")]
    )
    def test_clock(self, seconds: float, text: str) -> None:
        assert clock(seconds) == text


@pytest.mark.slow
def test_the_defaults_reach_95_percent_with_a_certificate(train: Command) -> None:
    assert train("--out", "run", tiny=False).code == 0
    found = result("run")
    assert found["test_accuracy"] >= 0.95
    assert found["certified_accuracy"]["0.1"] > 0.4
    assert found["bound"] <= 1.01
