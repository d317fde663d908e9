"""`opnorm sweep`: a grid of `opnorm train` runs on Ray, which can be stopped at any moment and goes on where it was."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from filelock import FileLock, Timeout
from rich.console import Console

from opnorm.lab.checkpoint import remove_parts, write_bytes
from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.data import load_data
from opnorm.lab.record import environment, plain, write_json
from opnorm.lab.sweep_board import Board
from opnorm.lab.sweep_grid import Run, read_grid
from opnorm.lab.sweep_ray import Share, cluster, require_room, submit
from opnorm.lab.sweep_show import figure_of, tables_of
from opnorm.lab.sweep_state import ENDED, Entry, entries_of
from opnorm.lab.train_config import Train
from opnorm.lab.train_loop import Signals
from opnorm.lab.train_model import build_network

PROGRAM = "opnorm sweep"
NAME, FIGURE, LOCK = "sweep.json", "sweep.png", ".lock"
WAIT = 0.5  # seconds between two looks
WRONG = 2  # exit code of a run that was given wrong values, which it would have the next time too


@dataclass(frozen=True)
class Sweep:
    """Run a grid of `opnorm train` runs, several at a time, on this machine or on a Ray cluster.

    Begun again, it goes on: what has ended is kept, what was interrupted is resumed, what is new in the file is run.

    For example:
      opnorm sweep examples/sweep_digits.yaml
      opnorm sweep grid.yaml --set epochs=10 --cpus-per-run 4 --gpus-per-run 0.5
      opnorm sweep --show sweeps/grid
    """

    grid: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="GRID.yaml")] = None
    """A file with settings of `opnorm train`: `run:` those of all runs, `grid:` a list for each that varies."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to write: a folder for each run, sweep.json and sweep.png. Without it: sweeps/ and the name of the file."""

    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """A setting in place of that in the file, such as epochs=10 or K=[1,2]. May be repeated."""

    cpus_per_run: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """CPU cores of each run, and its threads. The results of other numbers differ in rounding."""

    gpus_per_run: Annotated[float, tyro.conf.arg(metavar="N")] = 0.0
    """GPUs of each run; 0.5 for two runs on one."""

    retries: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """How often to go on with a run that fails. One that diverges has not failed: that is a result."""

    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Of a Ray cluster whose machines share this folder; without it, Ray is started on this machine alone."""

    show: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Only show the results of this folder, or of this sweep.json, and draw its figure again."""


def main(argv: Sequence[str]) -> int:
    """Run `opnorm sweep`."""
    options = parse(Sweep, argv, PROGRAM)
    if options.show is not None and options.grid is not None:
        raise UsageError("expected GRID.yaml, or --show FOLDER, got both; leave one of them out")
    if options.show is not None:
        return _show_again(options.show)
    _check(options)
    assert options.grid is not None
    runs = read_grid(options.grid, options.set)
    out = options.out or Path("sweeps") / options.grid.stem
    return run_sweep(runs, out, options, ["sweep", *argv])


def run_sweep(runs: Sequence[Run], out: Path, options: Sweep, argv: Sequence[str]) -> int:
    """Run what has no result in `out` yet, and write sweep.json and its figure there; the exit code.

    `argv` are the arguments of `opnorm` that repeat it. Of the options, the grid and where to write are not looked at.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"expected --out as a folder, got {out}, which is a file")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=0):
            return _locked(runs, out, options, argv)
    except Timeout:
        raise UsageError(
            f"expected a folder that no other sweep works in, got {out}; wait for it or use --out"
        ) from None


def _locked(runs: Sequence[Run], out: Path, options: Sweep, argv: Sequence[str]) -> int:
    for name in (NAME, FIGURE):
        remove_parts(out / name)
    entries = entries_of(runs, out)
    waiting = [entry for entry in entries if not entry.settle()]
    for entry in waiting:
        entry.look()
    require_fit([entry.run.config for entry in waiting])
    about = {
        "environment": environment(argv) if waiting else _environment(out / NAME, argv),
        "run": {k: plain(v) for k, v in runs[0].settings.items() if k not in runs[0].cell},
        "grid": {name: _values(runs, name) for name in runs[0].cell},
        "cpus_per_run": options.cpus_per_run,
        "gpus_per_run": options.gpus_per_run,
    }

    def save() -> None:
        write_json(out / NAME, about | {"rows": [entry.row() for entry in entries]})

    number = None
    if waiting:
        share = Share(options.cpus_per_run, options.gpus_per_run)
        with cluster(options.address):
            require_room(share)
            with Board(entries) as board:
                number = work(waiting, share, options.retries, board, save)
    save()
    show(out / NAME)
    return _end(entries, number, argv)


def work(entries: Sequence[Entry], share: Share, retries: int, board: Board, save: Callable[[], None]) -> int | None:
    """Run these to their ends; the number of the signal that stopped them, if one did."""
    import ray

    def begin(entry: Entry) -> Any:
        return submit(entry.begin(), entry.output, share)

    with Signals() as signals:
        tasks, stopping = {begin(entry): entry for entry in entries}, False
        while tasks:
            if signals.received is not None and not stopping:
                stopping = True
                board.say("stopping; the runs save where they are (once more to stop without that)")
                for task in reversed(tasks):  # those first that wait, so that none of them begins now
                    ray.cancel(task)
            for task in ray.wait([*tasks], timeout=WAIT)[0]:
                entry = tasks.pop(task)
                again = _settle(entry, task, stopping) and entry.tries <= retries
                if again:
                    board.say(f"{entry.folder.name} failed and goes on: {entry.reason}")
                    tasks[begin(entry)] = entry
                else:
                    board.ended(entry)
                save()
            board.update()
        return signals.received


def require_fit(configs: Sequence[Train]) -> None:
    """Refuse a model or data that cannot be had, once, and not in every run. What has to be downloaded, is."""
    kinds = {(c.model, c.arg, c.data, c.data_path, c.image_size, c.normalize, c.K_per): c for c in configs}
    for config in kinds.values():
        data = load_data(config.data, config.data_path, image_size=config.image_size)
        build_network(config, data, torch.device("cpu"))


def show(path: Path) -> None:
    """Print the tables of a sweep.json, and draw its figure beside it."""
    try:
        sweep = json.loads(path.read_text(encoding="utf-8"))
        tables, figure = [*tables_of(sweep)], figure_of(sweep)
    except OSError as error:
        raise UsageError(
            f"expected --show with the folder of a sweep or its {NAME}, got {path}: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected the results of a sweep in {path}, got something else: {error!r}") from error
    console = Console(width=console_width(), highlight=False)
    for table in tables:
        console.print(table)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path.with_suffix(".png"), buffer.getvalue())
    console.print(f"test accuracy in %, * the best of its row; {path} and {path.with_suffix('.png')}", markup=False)


def _show_again(path: Path) -> int:
    show(path / NAME if path.is_dir() else path)
    return 0


def _settle(entry: Entry, task: Any, stopping: bool) -> bool:
    """Take over how a task ended; True if it failed in a way that may be another the next time."""
    import ray

    code = None
    try:
        code = ray.get(task)
    except ray.exceptions.OutOfMemoryError:
        entry.reason = "it was killed, since the machine had no memory left"
    except ray.exceptions.RayError:  # it is dead, or was cancelled
        entry.reason = f"its process died after: {entry.last_words()}"
    if entry.settle():
        return False
    if stopping:
        entry.status, entry.reason = "stopped", None
        return False
    entry.status = "failed"
    if code is not None:
        entry.reason = f"exit code {code}: {entry.last_words()}"
    return code != WRONG


def _end(entries: Sequence[Entry], number: int | None, argv: Sequence[str]) -> int:
    """Say what has no result, and why; the exit code."""
    for entry in entries:
        if entry.status == "failed":
            print(f"failed: {entry.folder.name}: {entry.reason}; see {entry.output}", file=sys.stderr)
    if number is not None:
        left = sum(entry.status not in ENDED for entry in entries)
        print(f"{PROGRAM}: stopped with {left} runs to go; {shlex.join(['opnorm', *argv])} goes on")
        return 128 + number
    return int(any(entry.status == "failed" for entry in entries))


def _environment(path: Path, argv: Sequence[str]) -> Any:
    """Of the command that computed something last, where this one does not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["environment"]
    except (OSError, ValueError, KeyError, TypeError):
        return environment(argv)


def _values(runs: Sequence[Run], name: str) -> list[Any]:
    """The values of a setting that varies, in the order of the file."""
    values: list[Any] = []
    for run in runs:
        value = plain(run.cell[name])
        values += [value] if value not in values else []
    return values


def _check(options: Sweep) -> None:
    if options.grid is None:
        raise UsageError("expected GRID.yaml, or --show FOLDER, got neither; see opnorm sweep --help")
    if options.cpus_per_run < 1:
        raise UsageError(f"expected --cpus-per-run of at least 1, got {options.cpus_per_run}")
    gpus = options.gpus_per_run
    if not (0 <= gpus <= 1 or (gpus > 0 and gpus.is_integer())):
        raise UsageError(f"expected --gpus-per-run from 0 to 1, or a whole number, got {gpus}")
    if options.retries < 0:
        raise UsageError(f"expected --retries of at least 0, got {options.retries}")
