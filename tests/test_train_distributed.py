"""`opnorm train` in two processes: the weights of one process, one voice, and an end for both when one has to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tyro", reason="the extra lab is not installed")

from safetensors.torch import load_file

from opnorm.lab import checkpoint
from opnorm.lab.cli import main
from opnorm.lab.data import Share, load_data
from opnorm.lab.data_memory import MemoryImages
from opnorm.lab.train_parallel import _blocks
from train_worker import LIMIT, finished, in_processes, log_of, started

ROOT = Path(__file__).parents[1]
# 1433 images: eight batches whose halves differ by an image, and one of a single image.
RUN = (
    "--arg", "width=5", "--batch-size", "179", "--epochs", "2", "--device", "cpu",
    "--optimizer", "sgd", "--lr", "0.01", "--scaling", "soft",
)  # fmt: skip
STEPS = 18
ROUNDING = 2e-5  # relative, after 18 steps in float32; a last batch with the wrong weight is a hundred times that
MODELS = """
import os
from torch import nn

class Unlucky(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y * float("nan") if os.environ.get("LOCAL_RANK") == "1" else y

def unlucky():
    return Unlucky(nn.Flatten(), nn.Linear(64, 10))

def noisy():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 17), nn.Dropout(0.5), nn.ReLU(), nn.Linear(17, 10))
"""


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def step_of(folder: Path) -> int:
    path = folder / "checkpoint.pt"
    return int(checkpoint.load(path)["progress"]["step"]) if path.exists() else 0


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while step_of(folder) < step and time.monotonic() < deadline:
        time.sleep(0.005)


def ended(processes: list[Any], folder: Path) -> list[int | None]:
    """The exit codes; only the first process may have said anything."""
    codes = finished(processes)
    for process in processes[1:]:
        assert log_of(process, folder) == "", f"{codes}: {log_of(process, folder)}"
    return codes


def assert_alike(folder: Path, other: Path) -> None:
    """The same weights and history but for rounding."""
    weights, expected = (load_file(f / "model.safetensors") for f in (folder, other))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert float((weights[name] - value).norm()) <= ROUNDING * float(value.norm()), name
    for record, wanted in zip(result(folder)["history"], result(other)["history"], strict=True):
        assert record["step"] == wanted["step"]
        for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            assert record[key] == pytest.approx(wanted[key], rel=ROUNDING), key
        assert record["scales"] == pytest.approx(wanted["scales"], rel=ROUNDING)
    norms, expected_norms = (result(f).get("norms", {}) for f in (folder, other))  # none without normalisation
    assert norms == pytest.approx(expected_norms, rel=ROUNDING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of one process."""
    path = tmp_path_factory.mktemp("runs")
    (path / "zoo.py").write_text(MODELS)
    assert finished([started(path, *RUN, "--out", "one")]) == [0]
    return path


class TestTwoProcesses:
    def test_ddp_ends_in_the_weights_of_one_process(self, folder: Path) -> None:
        processes = in_processes(2, folder, *RUN, "--out", "ddp")
        assert ended(processes, folder) == [0, 0], log_of(processes[0], folder)
        assert_alike(folder / "ddp", folder / "one")
        assert "on 2 cpu processes, ddp" in log_of(processes[0], folder)
        lines = [json.loads(line) for line in (folder / "ddp" / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [STEPS // 2, STEPS]

    def test_fsdp_stops_for_both_and_goes_on_in_one_process(self, folder: Path) -> None:
        """A signal that the second process alone gets stops both; what they leave is what one process would leave."""
        settings = (*RUN, "--strategy", "fsdp", "--checkpoint-every", "0")
        processes = in_processes(2, folder, *settings, "--out", "fsdp", held_at={1: 4})
        wait_for_step(folder / "fsdp", 3)
        os.kill(processes[1].pid or 0, signal.SIGTERM)
        assert ended(processes, folder) == [128 + signal.SIGTERM, 0], log_of(processes[0], folder)
        assert "stopped by SIGTERM in step" in log_of(processes[0], folder)
        assert 3 <= step_of(folder / "fsdp") < STEPS
        stored, alone = (checkpoint.load(folder / run / "checkpoint.pt") for run in ("fsdp", "one"))
        assert shapes(stored["model"]) == shapes(alone["model"])
        assert [*map(shapes, stored["optimizer"]["state"].values())] == [
            *map(shapes, alone["optimizer"]["state"].values())
        ]
        process = started(folder, "--resume", "fsdp", "--devices", "1")
        assert finished([process]) == [0], log_of(process, folder)
        assert f"going on after step {stored['progress']['step']} of {STEPS}" in log_of(process, folder)
        assert_alike(folder / "fsdp", folder / "one")

    def test_fsdp_goes_on_where_one_process_was(self, folder: Path) -> None:
        process = started(folder, *RUN, "--out", "parts", "--checkpoint-every", "0", held_at=4)
        wait_for_step(folder / "parts", 3)
        process.kill()
        assert finished([process]) == [-signal.SIGKILL]
        processes = in_processes(2, folder, "--resume", "parts", "--strategy", "fsdp")
        assert ended(processes, folder) == [0, 0], log_of(processes[0], folder)
        assert "going on after step" in log_of(processes[0], folder)
        assert_alike(folder / "parts", folder / "one")

    @pytest.mark.parametrize("normalize", [(), ("--no-normalize",)])
    def test_divergence_of_one_ends_both(self, folder: Path, normalize: tuple[str, ...]) -> None:
        out = f"diverged{len(normalize)}"
        processes = in_processes(2, folder, "--model", "zoo.py:unlucky", "--device", "cpu", *normalize, "--out", out)
        assert ended(processes, folder) == [3, 0], log_of(processes[0], folder)
        assert result(folder / out)["status"] == "diverged"
        assert "nan" in result(folder / out)["reason"].lower()

    def test_the_other_processes_say_nothing_of_a_wrong_value(self, folder: Path) -> None:
        processes = in_processes(2, folder, *RUN, "--model", "zoo.py:absent", "--out", "wrong")
        assert ended(processes, folder) == [2, 2]
        assert log_of(processes[0], folder).startswith("opnorm train: ")
        assert not (folder / "wrong").exists()


def shapes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.shape if isinstance(value, Tensor) else value for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("settings", [("--K-per", "joint"), ("--no-normalize",), ("--scaling", "cap")])
def test_other_settings_end_in_the_weights_of_one_process(
    tmp_path: Path, strategy: str, settings: tuple[str, ...]
) -> None:
    settings = (*RUN, "--logit-scale", "1", *settings)
    assert finished([started(tmp_path, *settings, "--out", "one")]) == [0]
    processes = in_processes(2, tmp_path, *settings, "--out", "two", "--strategy", strategy)
    assert ended(processes, tmp_path) == [0, 0], log_of(processes[0], tmp_path)
    assert_alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_more_processes_than_images_in_the_last_batch(folder: Path) -> None:
    processes = in_processes(3, folder, *RUN, "--out", "three")
    assert ended(processes, folder) == [0, 0, 0], log_of(processes[0], folder)
    assert_alike(folder / "three", folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_kill_of_either_process_loses_nothing(tmp_path: Path, strategy: str) -> None:
    """Two processes that were killed and go on end in the same bytes; dropout draws what it would have drawn."""
    (tmp_path / "zoo.py").write_text(MODELS)
    settings = ("--model", "zoo.py:noisy", *RUN[2:], "--strategy", strategy, "--checkpoint-every", "0")
    assert ended(in_processes(2, tmp_path, *settings, "--out", "whole"), tmp_path) == [0, 0]
    for victim, arguments in ((0, (*settings, "--out", "parts")), (1, ("--resume", "parts"))):
        goal = step_of(tmp_path / "parts") + 3
        processes = in_processes(2, tmp_path, *arguments, held_at={victim: goal + 1})
        wait_for_step(tmp_path / "parts", goal)
        processes[victim].kill()
        codes = finished(processes)
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] not in (0, -signal.SIGKILL), "it did not notice"
    assert step_of(tmp_path / "parts") < STEPS
    assert ended(in_processes(2, tmp_path, "--resume", "parts"), tmp_path) == [0, 0]
    parts, whole = (tmp_path / run / "model.safetensors" for run in ("parts", "whole"))
    assert parts.read_bytes() == whole.read_bytes()


class TestLaunch:
    """From the command line, in processes that it starts itself."""

    def run(self, folder: Path, *command: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @pytest.mark.slow
    def test_devices_starts_the_others(self, folder: Path) -> None:
        """Ctrl-C, which a terminal sends to all of them, and going on."""
        run = self.run(folder, "opnorm", "train", *RUN, "--devices", "2", "--out", "own", "--checkpoint-every", "0")
        wait_for_step(folder / "own", 3)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=LIMIT)
        assert (run.returncode, err) == (130, ""), out + err
        assert out.count("stopped by SIGINT in step") == 1
        run = self.run(folder, "opnorm", "train", "--resume", "own")
        out, err = run.communicate(timeout=LIMIT)
        assert (run.returncode, err) == (0, ""), out + err
        assert "on 2 cpu processes, ddp" in out
        assert_alike(folder / "own", folder / "one")

    @pytest.mark.slow
    def test_a_wrong_value_is_said_before_anything_is_started(self, folder: Path) -> None:
        run = self.run(folder, "opnorm", "train", *RUN, "--devices", "2", "--out", "one")
        out, err = run.communicate(timeout=LIMIT)
        assert (run.returncode, err.count("\n")) == (2, 1), out + err

    @pytest.mark.slow
    def test_torchrun_works_too(self, folder: Path) -> None:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "opnorm", "train")
        run = self.run(folder, *torchrun, *RUN, "--out", "torchrun", "--checkpoint-every", "0", "--strategy", "fsdp")
        wait_for_step(folder / "torchrun", 3)
        os.killpg(run.pid, signal.SIGINT)  # torchrun hands it on to processes that have had it
        out, err = run.communicate(timeout=LIMIT)
        assert out.count("stopped by SIGINT in step") == 1, out + err
        run = self.run(folder, *torchrun, "--resume", "torchrun")
        out, err = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, out + err
        assert_alike(folder / "torchrun", folder / "one")

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (("--devices", "0"), "expected --devices of at least 1, got 0"),
            (("--devices", "3", "--batch-size", "2"), "expected --batch-size of at least the 3 processes, got 2"),
            (("--devices", "2", "--strategy", "fsdp", "--precision", "16"), "expected --precision 32 or bf16 with"),
            (("--devices", "2"), "expected --devices above 1 on a command line, got it inside another program"),
            (("--strategy", "dp"), "expected one of ddp, fsdp"),
        ],
    )
    def test_wrong_values_get_one_line(
        self, argv: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", "--device", "cpu", "--out", str(tmp_path / "run"), *argv]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


class TestShare:
    @pytest.mark.parametrize("n", [1, 2, 5, 12, 13])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 7])
    def test_every_image_belongs_to_one_process(self, n: int, ranks: int) -> None:
        shares = [Share(rank, ranks) for rank in range(ranks)]
        counts = [share.count(n) for share in shares]
        own = [i for share, count in zip(shares, counts, strict=True) for i in [*range(n)][share.of(n)][:count]]
        assert own == [*range(n)]
        assert max(counts) - min(counts) <= 1
        assert all(len([*range(n)][share.of(n)]) == max(1, count) for share, count in zip(shares, counts, strict=True))

    def test_the_shares_of_a_batch_are_the_batch_augmentation_included(self) -> None:
        data, cpu = load_data("digits"), torch.device("cpu")
        pixels = torch.randint(256, (23, 3, 9, 9), dtype=torch.uint8)
        train = MemoryImages(pixels, torch.arange(23), padding=2, flip=True)
        data = type(data)("x", train, data.test, (), (3, 9, 9), (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
        whole = [*data.training_batches(3, 11, 5, cpu)]
        parts = [[*data.training_batches(3, 11, 5, cpu, share=Share(rank, 3))] for rank in range(3)]
        for i, (x, y) in enumerate(whole[:-1]):
            assert torch.equal(torch.cat([part[i][0] for part in parts]), x)
            assert torch.equal(torch.cat([part[i][1] for part in parts]), y)
        assert len(whole[-1][1]) == 1
        assert all(torch.equal(part[-1][0], whole[-1][0]) for part in parts)


class TestBlocks:
    def test_containers_are_opened(self) -> None:
        layers = [nn.Linear(3, 3) for _ in range(4)]
        model = nn.Sequential(layers[0], nn.ReLU(), nn.Sequential(layers[1], nn.ModuleList(layers[2:])))
        assert _blocks(model) == layers

    def test_weights_in_common_are_not_torn_apart(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        assert _blocks(model) == []
