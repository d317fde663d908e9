"""`Screen`: what a person sees of a run: a bar where there is a terminal, and a line an epoch everywhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from opnorm.certify import above
from opnorm.lab.cli import console_width
from opnorm.lab.train_loop import Progress, Record


class Screen:
    """Shows rate, loss, accuracy, time left and the current certificate.

    Args:
        epochs, steps: how many epochs the run has, and how many steps an epoch.
        quiet: show nothing, as all processes of a run but the first.
        console: where to; stdout without it.

    `start` is the step at which the run goes on.
    """

    def __init__(self, epochs: int, steps: int, quiet: bool = False, console: Console | None = None):
        self.console = console or Console(width=console_width(), highlight=False, quiet=quiet)
        self.epochs, self.steps, self.total = epochs, steps, epochs * steps
        self.start, self._began, self._images = 0, time.monotonic(), 0
        self._bound, self._bound_at = "", 0
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=self.console, transient=True, disable=quiet or not self.console.is_terminal)
        self._task = self._bar.add_task("", total=self.total)

    def __enter__(self) -> Screen:
        self._began = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, markup=False)

    def warn(self, message: str) -> None:
        self.console.print(f"warning: {message}", markup=False, style="yellow")

    def stepped(self, progress: Progress, images: int) -> None:
        self._images += images
        if not self._bar.disable:
            loss = progress.loss / max(1, progress.seen)
            accuracy = progress.right / max(1, progress.seen)
            text = f"epoch {progress.epoch + 1}/{self.epochs}  {self._rate()}  loss {loss:.3f}  train {accuracy:.1%}"
            self._bar.update(self._task, completed=progress.step, description=text + self._bound)

    def evaluated(self, record: Record) -> None:
        if "bound" in record:
            self._bound, self._bound_at = f"  L ≤ {above(record['bound'], 3)}", record["epoch"]
        old = f" at {self._bound_at}" if self._bound and self._bound_at != record["epoch"] else ""
        left = self._left(record["step"])
        done = f"epoch {record['epoch']:>{len(str(self.epochs))}}/{self.epochs}  loss {record['train_loss']:.4f}"
        accuracy = f"train {record['train_accuracy']:.2%}  test {record['test_accuracy']:.2%}"
        time_left = f"  {clock(left)} left" if left else ""
        self.say(f"{done}  {accuracy}{self._bound}{old}  {self._rate()}{time_left}")

    def _rate(self) -> str:
        return f"{self._images / max(1e-9, time.monotonic() - self._began):,.0f} images/s"

    def _left(self, step: int) -> float:
        done = step - self.start
        return (time.monotonic() - self._began) / done * (self.total - step) if done else 0.0


def clock(seconds: float) -> str:
    """1:23 as minutes and seconds, or 1:02:03 with hours."""
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
