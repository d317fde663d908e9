"""`trained`: the training runs of an experiment, as a sweep that goes on after a kill and is shared by machines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from opnorm.lab.cli import UsageError
from opnorm.lab.data import Data
from opnorm.lab.paper.options import Options
from opnorm.lab.sweep import Sweep, require_fit, run_sweep
from opnorm.lab.sweep_grid import Run
from opnorm.lab.sweep_state import Entry, entries_of
from opnorm.lab.train_report import facts_of


@dataclass(frozen=True)
class Training(Options):
    """What every experiment can be told that trains networks."""

    runs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Where the runs are kept, a folder each. What has ended is not run again, unless with --restart."""

    cpus_per_run: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """CPU cores of each run; as many runs as fit go on at once."""

    gpus_per_run: Annotated[float | None, tyro.conf.arg(metavar="N")] = None
    """GPUs of each run; 0.5 for two runs on one. Without it: 1, or 0 where --device is or finds a CPU."""

    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Of a Ray cluster whose machines share the folder of the runs; without it, all is done on this machine."""

    @property
    def gpus(self) -> float:
        """GPUs of each run."""
        return float(self.torch_device.type == "cuda") if self.gpus_per_run is None else self.gpus_per_run


def settings_of_all(options: Training, seed: int, data_path: Path | None) -> dict[str, Any]:
    """The settings of `opnorm train` that every run gets."""
    where = {} if data_path is None else {"data_path": str(data_path)}
    return {"seed": seed, "device": options.torch_device.type, **where}


def milestones(epochs: int, published: Sequence[float]) -> dict[str, Any]:
    """The settings by which the learning rate falls at these parts of a run, where it has so many epochs."""
    found = sorted({round(part * epochs) for part in published} & {*range(1, epochs)})
    return {"milestones": found} if found else {"schedule": "constant"}


def trained(
    runs: Sequence[Run], folder: Path, data: Data, options: Training, argv: Sequence[str]
) -> tuple[int, list[Entry]]:
    """Train what is not trained yet; the exit code, and where it is 0 all runs with their results.

    Args:
        runs: of the experiment.
        folder: where they are kept.
        data: that of all of them.
        options: how many at a time, and where.
        argv: the arguments of `opnorm` that repeat it.
    """
    entries = entries_of(runs, folder)
    if options.restart:
        for entry in entries:
            shutil.rmtree(entry.folder, ignore_errors=True)
    _refuse_other_data(entries, data)
    sweep = Sweep(cpus_per_run=options.cpus_per_run, gpus_per_run=options.gpus, address=options.address)
    code = run_sweep(runs, folder, sweep, argv)
    entries = entries_of(runs, folder)
    for entry in entries:
        entry.settle()
    return code, entries


def check_runs(options: Training, runs: Sequence[Run]) -> None:
    """Refuse shares that no run can have, and models, data or a Ray that are not there."""
    if options.cpus_per_run < 1:
        raise UsageError(f"expected --cpus-per-run of at least 1, got {options.cpus_per_run}")
    if not (0 <= options.gpus <= 1 or (options.gpus > 0 and options.gpus.is_integer())):
        raise UsageError(f"expected --gpus-per-run from 0 to 1, or a whole number, got {options.gpus}")
    require_fit([run.config for run in runs])
    if "ray" not in sys.modules and find_spec("ray") is None:  # which is slow to import, and reads settings then
        raise UsageError('expected Ray, on which the runs go on side by side, got none; pip install "opnorm[sweep]"')


def about_data(data: Data) -> dict[str, Any]:
    """What a result says of the images."""
    facts = facts_of(data)
    return {"data": {key: facts[key] for key in ("name", "training", "test", "shape", "notes")} | _classes(facts)}


def cell_of(entry: Entry) -> dict[str, Any]:
    """What a result says of a run; with its command and its commit the run can be repeated."""
    result = entry.result() or {}
    last: Mapping[str, Any] = result["history"][-1] if result.get("history") else {}
    others = {name: result[name] for name in ("resumed", "ended") if name in result}
    return entry.row() | {"train_accuracy": last.get("train_accuracy"), "K_per": result.get("K_per")} | others


def _classes(facts: Mapping[str, Any]) -> dict[str, int]:
    return {"classes": len(facts["classes"])}


def _refuse_other_data(entries: Sequence[Entry], data: Data) -> None:
    """Where a folder lies is no setting of a run, so that what is in it has to be compared."""
    wanted = {"training": len(data.train.labels), "test": len(data.test.labels)}
    for entry in entries:
        found = (entry.result() or {}).get("data", wanted)
        if any(found[name] != count for name, count in wanted.items()):
            raise UsageError(
                f"expected runs on {wanted['training']:,} training and {wanted['test']:,} test images, got "
                f"{entry.folder} on {found['training']:,} and {found['test']:,}; use other --runs, or --restart"
            )
