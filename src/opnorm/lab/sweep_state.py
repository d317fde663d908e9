"""`Entry`: where a run of a sweep stands, which its own files say, so that a sweep can be begun again at any time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opnorm.lab.cli import UsageError
from opnorm.lab.record import plain
from opnorm.lab.sweep_grid import Run, arguments_of
from opnorm.lab.train import CONFIG
from opnorm.lab.train_config import FREE, Train, from_dict
from opnorm.lab.train_log import NAME as HISTORY

RESULT, OUTPUT = "result.json", "output.log"
Status = Literal["waiting", "running", "finished", "diverged", "failed", "stopped"]
ENDED = ("finished", "diverged")


@dataclass
class Entry:
    """One run.

    Attributes:
        run: its settings.
        folder: where it is written.
        status: `finished` and `diverged` are results; `failed` is one that `reason` tells of; `stopped` can go on.
        reason: why it diverged or failed.
        tries: how often it was begun by this command.
        epoch, accuracy: how far it is.
    """

    run: Run
    folder: Path
    status: Status = "waiting"
    reason: str | None = None
    tries: int = 0
    epoch: int = 0
    accuracy: float | None = None
    _seen: int = 0
    _printed: int = 0

    @property
    def output(self) -> Path:
        """What it printed."""
        return self.folder / OUTPUT

    def begin(self) -> list[str]:
        """Have it wait for its turn; the arguments of `opnorm train` that begin it, or go on with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.status, self.tries, self._printed = "waiting", self.tries + 1, _size(self.output)
        if not (self.folder / CONFIG).is_file():
            return [*arguments_of(self.run.settings), "--out", str(self.folder)]
        free = {name: value for name, value in self.run.settings.items() if name in FREE}
        return [*arguments_of(free), "--resume", str(self.folder)]

    def result(self) -> dict[str, Any] | None:
        """What it came to, if it has ended."""
        found = _json(self.folder / RESULT)
        return found if found is not None and is_same(_config(found), self.run.config) else None

    def settle(self) -> bool:
        """Take over how it ended; False if it has not."""
        result = self.result()
        if result is None:
            return False
        self.status, self.reason = result["status"], result["reason"]
        self.accuracy = result.get("test_accuracy")
        self.epoch = len(result["history"])
        return True

    def begun(self) -> bool:
        """Whether its turn has come, since it has printed something."""
        return _size(self.output) != self._printed

    def look(self) -> None:
        """See how far it is."""
        size = _size(self.folder / HISTORY)
        if size in (0, self._seen):
            return
        try:
            last = json.loads((self.folder / HISTORY).read_text(encoding="utf-8").splitlines()[-1])
        except (OSError, ValueError, IndexError):  # a line that is being written
            return
        self.epoch, self.accuracy, self._seen = last["epoch"], float(last["test_accuracy"]), size

    def last_words(self) -> str:
        """The line of its output that says what it failed of: of a crash the first of a long report, else the last."""
        try:
            with open(self.output, "rb") as file:
                file.seek(self._printed)
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            lines = []
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        return next((line for line in [*fatal, *reversed(lines)] if line), "it printed nothing")

    def row(self) -> dict[str, Any]:
        """What a table of the whole grid needs of it."""
        result = self.result() or {}
        environment = result.get("environment", {})
        return {
            "name": self.folder.name,
            "cell": plain(self.run.cell),
            "status": self.status,
            "reason": self.reason,
            "test_accuracy": result.get("test_accuracy"),
            "bound": result.get("bound"),
            "epochs": self.epoch,
            "seconds": result.get("seconds"),
            **{name: environment.get(name) for name in ("command", "commit", "threads", "gpu")},
        }


def entries_of(runs: Sequence[Run], out: Path) -> list[Entry]:
    """Each run with the folder in `out` that holds it already, by its settings, or with a new one."""
    held = {path.parent: _config(_json(path)) for path in sorted(out.glob(f"*/{CONFIG}"))}
    entries, taken = [], {folder.name for folder in held}
    for run in runs:
        folder = next((folder for folder, config in held.items() if is_same(config, run.config)), None)
        if folder is None:  # other settings may have the same name: then it gets a number
            names = (run.name if i == 1 else f"{run.name}-{i}" for i in range(1, len(taken) + 2))
            folder = out / next(name for name in names if name not in taken)
            taken.add(folder.name)
        entries.append(Entry(run, folder))
    return entries


def is_same(a: Train | None, b: Train | None) -> bool:
    """Whether two runs compute the same, wherever and however fast."""
    names = [field.name for field in dataclasses.fields(Train) if field.name not in FREE]
    return a is not None and b is not None and all(getattr(a, name) == getattr(b, name) for name in names)


def _config(content: Any) -> Train | None:
    """The settings in the JSON of a run; None where this version does not know them."""
    try:
        return from_dict(content["config"])
    except (UsageError, KeyError, TypeError):
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
