"""`Stage`: Ray without its processes, for tests of what a sweep does with how its runs end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opnorm.lab import sweep
from opnorm.lab.cli import main
from opnorm.lab.train_config import Train, from_dict, read_config


class Died(Exception):
    """What Ray raises for a task whose process has died."""


class NoMemory(Died):
    """The same, because Ray killed it."""


Play = Callable[[Path, Train], int | Exception]


class Stage:
    """Ray without its processes: tasks end one after another, when they are waited for, as `play` has it.

    Args:
        play: what the run in a folder, with these settings, does; the exit code, or the error that Ray raises.
    """

    exceptions = SimpleNamespace(RayError=Died, OutOfMemoryError=NoMemory)

    def __init__(self, play: Play):
        self.play, self.tasks, self.cancelled = play, list[list[str]](), list[int]()

    def submit(self, argv: Sequence[str], log: Path, share: Any) -> int:
        self.tasks.append([*argv])
        return len(self.tasks) - 1

    def wait(self, tasks: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return tasks[:1], tasks[1:]

    def get(self, task: int) -> int:
        if task in self.cancelled:
            raise Died
        argv = self.tasks[task]
        folder = Path(argv[-1])
        if argv[-2] == "--resume":
            config = from_dict(json.loads((folder / "config.json").read_text())["config"])
        else:
            config = read_config(argv)
        code = self.play(folder, config)
        if isinstance(code, Exception):
            raise code
        return code

    def cancel(self, task: int) -> None:
        self.cancelled.append(task)

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> Stage:
        """Have the sweeps from now on run here."""
        monkeypatch.setitem(sys.modules, "ray", self)
        monkeypatch.setattr(sweep, "submit", self.submit)
        monkeypatch.setattr(sweep, "cluster", lambda address: contextlib.nullcontext())
        monkeypatch.setattr(sweep, "require_room", lambda share: None)
        return self


class Theatre(Stage):
    """A stage on which `opnorm train` itself is played, in this process."""

    def __init__(self) -> None:
        super().__init__(lambda folder, config: 0)

    def get(self, task: int) -> int:
        return main(["train", *self.tasks[task]])
