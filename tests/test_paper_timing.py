"""`opnorm reproduce timing`: the real loop, three ways in turn, and what is said of their times."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm import operator_norm, operators_of
from opnorm.lab import paper
from opnorm.lab.bench.step import normalized_by_layer, paper_methods
from opnorm.lab.bench.train import whole_batches
from opnorm.lab.cli import run
from opnorm.lab.data import Data, load_data
from opnorm.lab.data_memory import MemoryImages
from opnorm.lab.paper import timing
from opnorm.lab.paper.image_folder import write_images
from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.sections import SECTIONS
from opnorm.lab.paper.timing import Timing, measure, trainers
from opnorm.lab.paper.timing_page import BARE, OURS, PAPER, figure, timing_claims
from opnorm.lab.train_config import Train
from opnorm.normalize import Normalizer

SMALL = Train(optimizer="sgd", lr=1e-3, batch_size=100, K=2.0, schedule="constant", arg=("width=8",))


def colours(n: int) -> Data:
    """Images in memory such as those of CIFAR-10."""
    images = MemoryImages(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 3)
    return Data("colours", images, images, ("a", "b", "c"), (3, 32, 32), (0.5,) * 3, (0.2,) * 3)


class TestTrainers:
    def test_each_takes_the_steps_of_the_real_loop(self) -> None:
        found = trainers(SMALL, load_data("digits"))
        for name, trainer in found.items():
            taken = whole_batches(trainer)
            for _ in range(trainer.steps + 1):
                next(taken)
            assert trainer.progress.step == trainer.steps + 1, name
            assert trainer.progress.epoch == 1
        assert [isinstance(t.network.normalizer, Normalizer) for t in found.values()] == [False, True, False]

    def test_the_same_start_and_the_same_images(self) -> None:
        found = trainers(SMALL, load_data("digits"))
        weights = [[*trainer.network.bare.parameters()] for trainer in found.values()]
        for other in weights[1:]:
            assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))

    def test_two_of_three_have_the_norms_after_every_step(self) -> None:
        data = load_data("digits")
        for name, trainer in trainers(SMALL, data).items():
            taken = whole_batches(trainer)
            for _ in range(3):
                next(taken)
            operators = operators_of(trainer.network.plain(), data.shape)
            paired = SMALL.K**0.5
            norms = {layer: float(operator_norm(op)) for layer, op in operators.items()}
            pairs = [norm for layer, norm in norms.items() if "wise" in layer]
            assert len(pairs) == 4
            assert all(norm <= paired * 1.02 for norm in pairs) == (name != BARE), (name, norms)

    def test_the_method_of_the_paper_is_the_published_one(self) -> None:
        data = load_data("digits")
        trainer = trainers(SMALL, data)[PAPER]
        next(whole_batches(trainer))
        for operator in operators_of(trainer.network.model, data.shape).values():
            if operator.geometry.kind == "depthwise":
                grid = [n + 2 for n in operator.geometry.input_size]
                weight = operator.weight.detach().double().unflatten(0, (operator.geometry.groups, -1))[:, :, 0]
                response = torch.linalg.vector_norm(torch.fft.fft2(weight, s=grid), dim=1)  # over outputs of a channel
                assert float(response.amax()) == pytest.approx(SMALL.K**0.5, rel=1e-5)

    def test_layers_of_other_kinds_stay(self) -> None:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1))
        before = [p.detach().clone() for p in model.parameters()]
        normalized_by_layer(model, (3, 8, 8), 0.5, paper_methods())()
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert changed == [False, False, True, False]
        assert float(torch.linalg.matrix_norm(model[1].weight.detach().flatten(1), 2)) == pytest.approx(0.5, rel=0.05)


class TestMeasure:
    def test_an_epoch_is_its_steps(self) -> None:
        cell = measure(SMALL, load_data("digits"), rounds=2)
        assert [*cell["step"]] == [*cell["epoch"]] == [BARE, OURS, PAPER]
        assert cell["steps of an epoch"] == cell["data"]["images"] / 100
        for name, epoch in cell["epoch"].items():
            for quartile, seconds in epoch.items():
                step = cell["step"][name]["seconds"][quartile]
                assert seconds == pytest.approx(step * cell["data"]["images"] / 100) and step > 0
        assert cell["step"][BARE]["ratio"]["median"] == 1

    def test_published_settings_but_for_the_rate(self) -> None:
        for name, K, scaling in (("paper-cifar10", 5.0, "hard"), ("paper-imagenet", 3.0, "soft")):
            config = timing._config(Timing(), name, K, 7)
            assert (config.K, config.scaling, config.batch_size, config.optimizer) == (K, scaling, 7, "sgd")
            assert config.checkpoint_every == float("inf") and config.lr == timing.RATE

    @pytest.mark.parametrize("size", [(50, 40), None])
    def test_files_are_made_that_the_loader_reads(self, size: tuple[int, int] | None, tmp_path: Path) -> None:
        made = colours(40)
        note = write_images(made, tmp_path, 30, 6, size)
        data = load_data("imagenet", tmp_path, image_size=8)
        assert (len(data.train.labels), len(data.test.labels), data.classes) == (30, 6, made.classes)
        assert "30 training images" in note and ("50×40" if size else "32×32") in note

    def test_files_hold_the_images_of_their_class(self, tmp_path: Path) -> None:
        made = colours(30)
        write_images(made, tmp_path, 30, 3, None)
        data = load_data("imagenet", tmp_path, image_size=28)  # resized to 32, then the centre
        test = next(data.test_batches(3, torch.device("cpu"), standardize=False))
        expected: Tensor = made.test.images[:3, :, 2:30, 2:30].float() / 255  # type: ignore[attr-defined]
        torch.testing.assert_close(test[0].contiguous(), expected)
        assert test[1].tolist() == [0, 1, 2]


class TestCommand:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (("--data-path", "missing"), "expected --data-path as a folder or file that exists"),
            (("--rounds", "1"), "expected --rounds of at least 2"),
            (("--profile", "paper"), "expected --images with a folder of images in the profile paper"),
            (("--made", "20", "--imagenet-batch", "30"), "expected --imagenet-batch of at most 20, got 30"),
        ],
    )
    def test_what_is_wrong_is_one_line_before_anything_begins(
        self, argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        if "--data-path" not in argv:
            monkeypatch.setattr(timing, "load_data", lambda *a, **k: colours(200))
        assert run("opnorm", lambda: paper.main(["timing", *argv, "--out", str(tmp_path)])) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
        assert not list(tmp_path.iterdir())

    def test_a_network_is_a_cell(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def small(config: Train, data: Data, rounds: int) -> dict[str, Any]:
            seen.append(config.model)
            if len(seen) == 2:
                raise KeyboardInterrupt
            digits = replace(SMALL, K=config.K, scaling=config.scaling, batch_size=500)
            return measure(digits, load_data("digits"), rounds) | {"notes": data.notes}

        seen: list[str] = []
        cifar = colours(200)
        real = load_data

        def load(name: str, *a: Any, **k: Any) -> Data:
            return cifar if name == "cifar10" else real(name, *a, **k)

        monkeypatch.setattr(timing, "keep_memory", lambda arguments: None)  # it would replace this process
        monkeypatch.setattr(timing, "load_data", load)
        monkeypatch.setattr(timing, "measure", small)
        argv = ["timing", "--rounds", "2", "--made", "20", "--image-size", "16", "--out", str(tmp_path)]
        argv += ["--docs", str(tmp_path)]
        with pytest.raises(KeyboardInterrupt):
            paper.main(argv)
        assert [file.name for file in tmp_path.iterdir()] == ["timing.part.json"]
        assert paper.main(argv) == 0
        assert seen == ["ds_resnet34", "mobilenet_v2", "mobilenet_v2"]
        content = json.loads((tmp_path / "timing.json").read_text())
        assert [*content["cells"]] == ["ds_resnet34", "mobilenet_v2"]
        assert "20 training images" in content["cells"]["mobilenet_v2"]["notes"][0]
        assert (tmp_path / "timing.svg").is_file()


def made(ours: float, published: float) -> dict[str, Any]:
    """A result with these factors."""
    cell = {
        "data": {"images": 640, "shape": [3, 224, 224], "notes": ["made"], "name": "x"},
        "K": 3.0, "scaling": "soft", "batch": 16, "steps of an epoch": 40.0,
        "step": {n: {"ratio": {"median": r, "low": r - 0.01, "high": r + 0.01}}
                 for n, r in ((BARE, 1.0), (OURS, ours), (PAPER, published))},
        "epoch": {n: {"median": 40 * r} for n, r in ((BARE, 1.0), (OURS, ours), (PAPER, published))},
    }  # fmt: skip
    machine = {"command": "opnorm reproduce timing --out x", "gpu": None, "processor": "P", "cores": 2, "torch": "2"}
    result = {"environment": machine, "profile": "small", "changes": [], "settings": {"rounds": 15}}
    return result | {"cells": {"ds_resnet34": cell, "mobilenet_v2": copy.deepcopy(cell)}}


class TestPage:
    def test_claims_follow_the_numbers(self) -> None:
        assert [*timing_claims(made(1.01, 1.05)).values()] == [True, True]
        assert [*timing_claims(made(1.03, 1.05)).values()] == [True, False]
        assert [*timing_claims(made(1.02, 1.005)).values()] == [True, True]  # quartiles of 0.01 on both sides
        assert [*timing_claims(made(1.02, 0.99)).values()] == [False, True]

    def test_published_times_stand_beside_ours(self) -> None:
        page = SECTIONS["timing"](made(1.01, 1.05))
        assert "| ds_resnet34 | the paper's method | 42.0 s | 1.050 | 1.040 to 1.060 | 59.59 s | 1.63 |" in page
        assert "| mobilenet_v2 | Normalizer | 40.4 s | 1.010 | 1.000 to 1.020 |  |  |" in page
        assert "| mobilenet_v2 | no normalisation | 40.0 s | 1.000 |  | 3016 s | 1 |" in page
        assert "640 training images (made) of 3×224×224, batches of 16" in page
        assert NOISE["timing"] in page

    def test_bars_are_factors(self) -> None:
        (axes,) = figure(made(1.01, 1.05)).axes
        widths = [round(bar.get_width(), 6) for bar in axes.patches]
        assert widths == [0.01, 0.05] * 2
