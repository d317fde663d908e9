"""Nothing is lost: runs that are killed at random moments, and a checkpoint on a disk that is full."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm.lab import checkpoint
from opnorm.lab.cli import UsageError
from train_worker import LIMIT, finished, log_of, started

RUN = (
    "--arg", "width=7", "--batch-size", "61", "--optimizer", "sgd", "--scaling", "soft",
    "--lr", "0.01", "--checkpoint-every", "0", "--device", "cpu",
)  # fmt: skip


def left_alone(folder: Path, *argv: str) -> str:
    """What it prints when it is left alone."""
    process = started(folder, *argv)
    codes = finished([process])
    assert codes == [0], log_of(process, folder)
    return log_of(process, folder)


def step_of(folder: Path) -> int:
    path = folder / "checkpoint.pt"
    return int(checkpoint.load(path)["progress"]["step"]) if path.exists() else 0


def killed(folder: Path, run: str, how: signal.Signals, chance: random.Random, last: int) -> None:
    """Resume a run and kill it at a random moment: some steps later, anywhere in a step; or while it still begins.

    On a machine that is busy with other things, it gets as far as the `last` step and waits there, not yet saved.
    """
    process = started(folder, "--resume", run, held_at=last)
    goal = min(step_of(folder / run) + chance.randint(0, 5), last - 1)
    deadline = time.monotonic() + LIMIT
    while process.is_alive() and step_of(folder / run) < goal and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.05))
    os.kill(process.pid or 0, how)
    (code,) = finished([process])
    assert code in (-how, 128 + how), f"{how} ended it with {code}: {log_of(process, folder)}"


def kill_and_compare(folder: Path, kills: list[signal.Signals], *, epochs: int, seed: int) -> None:
    """A run that was killed, and resumed, after each signal ends in the bytes of one that was not."""
    chance, settings = random.Random(seed), (*RUN, "--epochs", str(epochs))
    left_alone(folder, *settings, "--out", "whole")
    total = step_of(folder / "whole")
    process = started(folder, *settings, "--out", "parts", held_at=total - 1)
    while process.is_alive() and not (folder / "parts" / "config.json").exists():
        time.sleep(0.005)
    process.kill()  # before anything is trained
    assert finished([process]) == [-signal.SIGKILL]
    for how in kills:
        killed(folder, "parts", how, chance, total - 1)
    assert 0 < step_of(folder / "parts") < total, "the run was finished before the last kill"
    for name in ("checkpoint.pt", "log.jsonl", "result.json"):  # as a kill in the midst of writing leaves them
        (folder / "parts" / f"{name}.1.part").write_bytes(b"half")
    assert "going on after step" in left_alone(folder, "--resume", "parts")
    parts, whole = (folder / run / "model.safetensors" for run in ("parts", "whole"))
    assert parts.read_bytes() == whole.read_bytes()
    assert not [*(folder / "parts").glob("*.part")]


def test_kills_leave_the_same_weights(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, [signal.SIGKILL, signal.SIGTERM], epochs=2, seed=0)


@pytest.mark.slow
def test_twenty_kills_leave_the_same_weights(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * 5, epochs=12, seed=1)


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Writes beyond this size fail, half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from opnorm.lab import checkpoint
from opnorm.lab.cli import main
from opnorm.lab.train_show import Screen

stepped, disk, settings = Screen.stepped, Path.cwd(), sys.argv[1:]

def fill(self, progress, images):
    stepped(self, progress, images)
    if progress.step == 9:
        (disk / "full").write_bytes(bytes(1))
        try:
            with open(disk / "full", "ab", buffering=0) as file:
                while file.write(bytes(1024)):
                    pass
        except OSError as error:
            assert error.errno == 28, error

assert main(["train", *settings, "--out", "whole"]) == 0
Screen.stepped = fill
assert main(["train", *settings, "--out", "parts"]) == 1, "there was room for the results"
Screen.stepped = stepped
assert checkpoint.load(Path("parts/checkpoint.pt"))["progress"]["step"] == 8
(disk / "full").unlink()
assert main(["train", "--resume", "parts"]) == 0
assert Path("parts/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
"""


@pytest.mark.slow
def test_a_run_goes_on_after_its_disk_was_full(tmp_path: Path) -> None:
    """On a file system of two megabytes, in a mount namespace of its own, where that is allowed."""
    space = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}; cd {tmp_path};"
    if shutil.which("unshare") is None or subprocess.run([*space, mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    command = [*space, mount + 'exec "$@"', "sh", sys.executable, "-c", ON_A_SMALL_DISK, *RUN, "--epochs", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "the checkpoint could not be written: [Errno 28] No space left on device; the last one is kept" in done.stdout
    )
    assert "No space left on device; what was saved before is in parts" in done.stderr


class TestCheckpoint:
    def test_what_was_saved_is_loaded(self, tmp_path: Path) -> None:
        content = {"model": {"a": torch.arange(7.0)}, "progress": {"step": 3, "history": [{"x": 0.1, "y": None}]}}
        checkpoint.save(tmp_path / "c.pt", content)
        found = checkpoint.load(tmp_path / "c.pt")
        assert torch.equal(found["model"]["a"], content["model"]["a"])
        assert found["progress"] == content["progress"]
        assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]

    def test_a_full_disk_leaves_the_last_one(self, tmp_path: Path) -> None:
        path = tmp_path / "c.pt"
        checkpoint.save(path, {"weight": torch.zeros(10)})
        with disk_of(50_000), pytest.raises(OSError, match="File too large") as caught:
            checkpoint.save(path, {"weight": torch.ones(100_000)})
        assert caught.value.errno == errno.EFBIG
        assert torch.equal(checkpoint.load(path)["weight"], torch.zeros(10))
        assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]

    def test_a_kill_before_the_end_leaves_the_last_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.pt"
        checkpoint.save(path, {"step": 1})

        def die(*_: Any) -> None:
            raise SystemExit

        for point in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, point, die)
                with pytest.raises(SystemExit):
                    checkpoint.save(path, {"step": 2})
            assert checkpoint.load(path)["step"] == 1

    def test_parts_of_killed_processes_are_removed(self, tmp_path: Path) -> None:
        (tmp_path / "c.pt.123.part").write_bytes(b"half")
        (tmp_path / "other.part").write_bytes(b"mine")
        checkpoint.remove_parts(tmp_path / "c.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["other.part"]

    @pytest.mark.parametrize("cut", [0, 10, 300, -30])
    def test_a_cut_file_is_named(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "c.pt"
        checkpoint.save(path, {"weight": torch.zeros(100)})
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(UsageError, match=rf"{re.escape(str(path))}, which cannot be read"):
            checkpoint.load(path)

    def test_code_in_a_checkpoint_does_not_run(self, tmp_path: Path) -> None:
        path = tmp_path / "c.pt"
        torch.save({"format": 1, "model": Bomb()}, path)
        with pytest.raises(UsageError, match="which cannot be read"):
            checkpoint.load(path)
        path.write_bytes(pickle.dumps(Bomb(), protocol=2))
        with pytest.raises(UsageError, match="which cannot be read"):
            checkpoint.load(path)

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        torch.save({"format": 99}, tmp_path / "c.pt")
        with pytest.raises(UsageError, match=r"format 1, got .* of 99; use the version that wrote it"):
            checkpoint.load(tmp_path / "c.pt")

    def test_random_numbers_go_on_where_they_were(self, tmp_path: Path) -> None:
        random.gauss(0, 1)  # of which Python keeps a second one
        torch.randn(3)
        checkpoint.save(tmp_path / "c.pt", {"random": checkpoint.random_state()})
        expected = (random.gauss(0, 1), random.random(), torch.randn(5), torch.rand(2))
        torch.manual_seed(9)
        random.seed(9)
        checkpoint.set_random_state(checkpoint.load(tmp_path / "c.pt")["random"])
        found = (random.gauss(0, 1), random.random(), torch.randn(5), torch.rand(2))
        assert found[:2] == expected[:2]
        assert torch.equal(found[2], expected[2]) and torch.equal(found[3], expected[3])


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a checkpoint was unpickled",)
