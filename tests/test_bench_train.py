"""`opnorm bench train`: what is timed is the loop that trains, and the step that a person would write."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm.lab.bench import train
from opnorm.lab.bench.timing import MALLOC
from opnorm.lab.cli import main
from opnorm.lab.data import load_data
from opnorm.lab.train_loop import Trainer

TINY = ("bench", "train", "--arg", "width=5", "--rounds", "2", "--steps", "2", "--batch-size", "411")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which else would be replaced by another with settings for its memory."""
    for name, value in MALLOC.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")


def test_it_writes_what_it_shows(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.json"
    assert main([*TINY, "--json", str(path)]) == 0
    shown, found = capsys.readouterr().out, json.loads(path.read_text())
    assert [*found["times"]] == [train.BARE, train.PLAIN, train.NORMALIZED, train.LOOP, train.DATA]
    assert found["times"][train.BARE]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for name, cell in found["times"].items():
        assert 0 < cell["seconds"]["low"] <= cell["seconds"]["median"] <= cell["seconds"]["high"]
        assert cell["rounds"] == 2
        assert name in shown
    part = 1 / found["times"][train.LOOP]["ratio"]["median"]
    assert f"{part:.1%}" in shown
    assert (found["batch"], found["steps_a_round"], found["data"]["training"]) == (411, 2, 1433)
    assert found["environment"]["command"].startswith("opnorm bench train --arg width=5")
    assert not [*tmp_path.glob("**/checkpoint.pt")]


def test_the_loop_and_the_bare_step_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same batch both have the same weights afterwards; the loop takes whole batches alone, in every epoch."""
    trainers, sizes = [], []
    step = Trainer._step

    def seen(self: Trainer, x: torch.Tensor, y: torch.Tensor, n: int) -> None:
        if self not in trainers:
            trainers.append(self)
        sizes.append(len(x))
        step(self, *(batch if len(sizes) == 1 else (x, y)), n)

    options = train.BenchTrain(arg=("width=5",), batch_size=411)
    config, data = train._config(options), load_data("digits")
    batch = next(data.training_batches(0, 411, 0, torch.device("cpu")))
    monkeypatch.setattr(Trainer, "_step", seen)
    networks = []
    build = train.build_network
    monkeypatch.setattr(train, "build_network", lambda *a: networks.append(build(*a)) or networks[-1])
    with train._logged() as logs:
        found = train._candidates(config, data, logs)
        for name in (train.BARE, train.PLAIN, train.NORMALIZED, train.LOOP):
            next(found[name])
        bare, plain, normalized, loop = (network.plain().state_dict() for network in networks)
        torch.testing.assert_close(bare, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(normalized, loop, rtol=1e-5, atol=1e-6)
        assert any((plain[name] - loop[name]).abs().max() > 1e-3 for name in loop)
        assert [*islice(found[train.LOOP], 7)] == [None] * 7
        assert (trainers[1].progress.epoch, trainers[1].progress.batch) == (2, 2)
        assert len({float(x.sum()) for x in islice(found[train.DATA], 7)}) == 7
    assert {*sizes} == {411}
    assert not logs.folder.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rounds", "1"], "expected --rounds of at least 2, got 1"),
        (["--steps", "0"], "expected --steps of at least 1, got 0"),
        (["--batch-size", "0"], "expected --batch-size of at least 1"),
        (["--batch-size", "2000"], "expected --batch-size of at most 1433, got 2000"),
        (["--preset", "paper"], "expected one of digits, paper-cifar10"),
        (["--preset", "paper-cifar10", "--data-path", "nowhere"], "got nowhere"),
        (["--json", "nowhere/a.json"], "expected --json as a file in a folder that exists"),
    ],
)
def test_wrong_values_get_one_line(argv: list[str], words: str, capsys: Any) -> None:
    assert main(["bench", "train", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("opnorm bench: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
