"""`Board`: a sweep as it runs, as a table that changes in a terminal, and elsewhere a line for each run that ends."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from opnorm.lab.cli import console_width
from opnorm.lab.sweep_state import ENDED, Entry, Status
from opnorm.lab.train_show import clock

ORDER: tuple[Status, ...] = ("running", "failed", "waiting", "stopped", "diverged", "finished")  # where not all fit
STYLES = {"running": "bold", "failed": "red", "diverged": "yellow", "waiting": "dim"}


class Board:
    """What a person sees of a sweep.

    Args:
        entries: all runs of it.
    """

    def __init__(self, entries: Sequence[Entry]):
        self.console = Console(file=sys.stdout, width=console_width(), highlight=False)
        self.entries, self._began = entries, time.monotonic()
        self._before = sum(entry.epoch for entry in entries)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self) -> None:
        """See how far the runs are, and show it."""
        for entry in self.entries:
            if entry.status == "waiting" and entry.tries and entry.begun():
                entry.status = "running"
                self._line(entry)
            if entry.status == "running":
                entry.look()
        if self._live.is_started:
            self._live.update(self._table(), refresh=True)

    def ended(self, entry: Entry) -> None:
        """A run has come to an end, of whatever kind."""
        self._line(entry)

    def _line(self, entry: Entry) -> None:
        if not self._live.is_started:
            self.say("  ".join(text for text in (*_texts(entry), f"[{self.summary()}]") if text))

    def summary(self) -> str:
        """As in "3 of 9 ended: 2 finished, 1 diverged; 0:40 left"."""
        counts = Counter[str](entry.status for entry in self.entries)
        over = (*ENDED, "failed")
        ended = [f"{counts[status]} {status}" for status in over if counts[status]]
        total = f"{sum(counts[status] for status in over)} of {len(self.entries)} ended"
        left = self._left()
        return (f"{total}: {', '.join(ended)}" if ended else total) + (f"; {clock(left)} left" if left else "")

    def _left(self) -> float:
        """By the epochs that are still to come, at the rate of those that this command has seen."""
        done = sum(entry.epoch for entry in self.entries) - self._before
        going = [entry for entry in self.entries if entry.status in ("waiting", "running")]
        remaining = sum(entry.run.config.epochs - entry.epoch for entry in going)
        return (time.monotonic() - self._began) / done * remaining if done > 0 else 0.0

    def _table(self) -> Table:
        room = max(1, self.console.height - 3)
        shown = sorted(self.entries, key=lambda entry: ORDER.index(entry.status))[:room]
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left")
        for title in ("run", "state", "epoch", "test accuracy"):
            table.add_column(title, no_wrap=True)
        for entry in (entry for entry in self.entries if entry in shown):
            table.add_row(*_texts(entry), style=STYLES.get(entry.status, ""))
        table.caption = self.summary()
        return table


def _texts(entry: Entry) -> tuple[str, str, str, str]:
    epoch = f"epoch {entry.epoch}/{entry.run.config.epochs}" if entry.epoch else ""
    accuracy = "" if entry.accuracy is None else f"test {entry.accuracy:.2%}"
    return entry.folder.name, entry.status, epoch, accuracy
