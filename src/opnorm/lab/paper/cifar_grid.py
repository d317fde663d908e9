"""`opnorm reproduce cifar-grid`: table 1 of the paper, ds_resnet34 on CIFAR-10 by K, learning rate and scaling.

The small profile is what two cores train in one to two hours. The published width of 64 leaves no room in that: a
step of it was measured to take 1.3 seconds of a core, so that one epoch of a single batch of CIFAR-10, and its test,
would be all of a run. A network of an eighth of the width takes 10 to 14 seconds for an epoch with its test, while
another run has the other core. With five epochs, which the milestones divide as they do the paper's 300, the 100 runs
of the committed result took 53 minutes, two at a time; they take two hours on a machine that is half as fast or busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from opnorm.lab.cli import UsageError
from opnorm.lab.data import load_data
from opnorm.lab.paper.cells import Result, compute
from opnorm.lab.paper.cifar_grid_page import MILESTONES
from opnorm.lab.paper.page import reproduce
from opnorm.lab.paper.runs import Training, about_data, cell_of, check_runs, milestones, settings_of_all, trained
from opnorm.lab.sweep_grid import Run, label_of, runs_of

WHAT = "cifar-grid"
SCALINGS = ("hard", "soft")
PROFILES: dict[str, dict[str, Any]] = {
    "small": {"epochs": 5, "width": 8},
    "paper": {"epochs": 300, "width": 64},
}


@dataclass(frozen=True)
class CifarGrid(Training):
    """Table 1: ds_resnet34 on CIFAR-10 for every K and learning rate, hard and soft scaling, 100 runs.

    For example:
      opnorm reproduce cifar-grid --data-path cifar-10-batches-bin
      opnorm reproduce cifar-grid --profile paper --gpus-per-run 0.5
    """

    data_path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Where CIFAR-10 is: a folder or an archive. What batches are there are used. Without it, it is downloaded."""

    epochs: int = 5
    """Of each run. The learning rate is divided by ten after a half and after five sixths of them."""

    width: int = 8
    """Channels of the first stage of the network, 64 in the paper."""

    K: tuple[float, ...] = tuple(map(float, range(1, 11)))
    """The norms of the separable convolutions and of the last layer."""

    lr: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """The learning rates."""

    seed: int = 0
    """For weights, order and augmentation, the same in every run."""


def main(argv: Sequence[str]) -> int:
    """Train, collect, draw."""
    return reproduce(WHAT, CifarGrid, PROFILES, argv, run)


def check(options: CifarGrid) -> None:
    """Refuse settings that no run can have, and data that are not there."""
    check_runs(options, grid(options))


def run(options: CifarGrid, argv: Sequence[str]) -> Result | int:
    """The result, once every run has ended; else the exit code."""
    check(options)
    data = load_data("cifar10", options.data_path, show=lambda _: None)
    code, entries = trained(grid(options), options.runs / WHAT, data, options, argv)
    if code:
        return code
    cells: dict[str, Callable[[], Any]] = {_name(entry.run): partial(cell_of, entry) for entry in entries}
    return compute(WHAT, options, argv, cells, profiles=PROFILES, seed=options.seed, about=about_data(data))


def grid(options: CifarGrid) -> list[Run]:
    """Every run, with the settings in appendix B.1 of the paper but for the size of network and schedule."""
    if options.width < 1:
        raise UsageError(f"expected --width of at least 1, got {options.width}")
    fixed = {"preset": "paper-cifar10", "arg": [f"width={options.width}"], "epochs": options.epochs}
    return runs_of(
        {
            "run": fixed
            | milestones(options.epochs, MILESTONES)
            | settings_of_all(options, options.seed, options.data_path),
            "grid": {"K": [*options.K], "lr": [*options.lr], "scaling": [*SCALINGS]},
        }
    )


def _name(run: Run) -> str:
    return ", ".join(f"{name} = {label_of(value)}" for name, value in run.cell.items())
