"""`Logs`: what a run measures, an epoch a line, for programs (JSONL) and for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from opnorm.lab.record import plain, write_text
from opnorm.lab.train_loop import Progress, Record, Watcher

NAME = "log.jsonl"


class Logs:
    """Writes to `log.jsonl` and to TensorBoard's event files in the folder of the run.

    Begins with the history of the run, so that what was logged after the checkpoint it goes on from is not there twice.
    """

    def __init__(self, folder: Path, progress: Progress, screen: Watcher):
        self.path, self.screen = folder / NAME, screen
        write_text(self.path, "".join(map(line_of, progress.history)))
        self.writer = SummaryWriter(str(folder), purge_step=progress.step + 1 if progress.step else None)

    def stepped(self, progress: Progress, images: int) -> None:
        self.screen.stepped(progress, images)

    def warn(self, message: str) -> None:
        self.screen.warn(message)

    def evaluated(self, record: Record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line_of(record))
            for name, value in scalars_of(record).items():
                self.writer.add_scalar(name, value, record["step"])
            self.writer.flush()
        except OSError as error:  # a full disk is no reason to lose the run
            self.warn(f"the log could not be written: {error}")
        self.screen.evaluated(record)

    def close(self) -> None:
        """Write what TensorBoard still holds."""
        try:
            self.writer.close()
        except OSError as error:
            self.warn(f"the log could not be written: {error}")


def line_of(record: Record) -> str:
    """A record as a line of JSON."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """{TensorBoard's tag: number}: losses together, accuracies together, each layer's norm and scale by its name."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": float(number) for name, number in value.items()}
        elif isinstance(value, int | float) and key not in ("epoch", "step"):
            part, _, what = key.partition("_")
            found[f"{what}/{part}" if part in ("train", "test") else key] = float(value)
    return found
