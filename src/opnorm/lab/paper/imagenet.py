"""`opnorm reproduce imagenet`: figure 3 of the paper, MobileNetV2 with soft scaling by K, on any folder of images.

The small profile proves the pipeline and no more: a few epochs on a folder of PNG files of 32×32 pixels, which is made
from CIFAR-10 and kept beside the runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opnorm.lab.cli import UsageError
from opnorm.lab.data import Data, load_data
from opnorm.lab.paper.cells import Result, compute
from opnorm.lab.paper.image_folder import write_images
from opnorm.lab.paper.options import WithImages, require_images
from opnorm.lab.paper.page import reproduce
from opnorm.lab.paper.runs import Training, about_data, cell_of, check_runs, milestones, settings_of_all, trained
from opnorm.lab.sweep_grid import Run, label_of, runs_of
from opnorm.lab.sweep_state import Entry
from opnorm.lab.train_config import IMAGENET
from opnorm.lab.train_loop import TEST_BATCH, logits_of
from opnorm.lab.trained import trained_in

WHAT = "imagenet"
TOP = 5
PROFILES: dict[str, dict[str, Any]] = {
    "small": {"epochs": 3, "batch_size": 16, "image_size": 32},
    "paper": {"epochs": 150, "batch_size": 128, "image_size": 224},
}


@dataclass(frozen=True)
class ImageNet(WithImages, Training):
    """Figure 3: MobileNetV2 with soft scaling, for each K its published learning rate and start of s.

    For example:
      opnorm reproduce imagenet --data-path cifar-10-batches-bin
      opnorm reproduce imagenet --profile paper --images imagenet
    """

    made: int = 1000
    """How many training images, and half as many test images, are made as PNG files, where --images is not given."""

    epochs: int = 3
    """Of each run. The learning rate is divided by ten after each third of them."""

    batch_size: int = 16
    """Images in a step."""

    image_size: int = 32
    """Crop to N×N pixels."""

    K: tuple[float, ...] = tuple(map(float, IMAGENET))
    """The norms of the layers."""

    seed: int = 0
    """For weights, order and augmentation, the same in every run."""


def main(argv: Sequence[str]) -> int:
    """Train, evaluate, draw."""
    return reproduce(WHAT, ImageNet, PROFILES, argv, run)


def check(options: ImageNet) -> None:
    """Refuse settings that no run can have, and images that are not there; those to be made, are."""
    require_images(options)
    if options.made < 20:
        raise UsageError(f"expected --made of at least 20, got {options.made}")
    if odd := [K for K in options.K if K not in IMAGENET]:
        known = ", ".join(map(str, IMAGENET))
        raise UsageError(f"expected --K among those with a published learning rate, {known}, got {label_of(odd)}")
    check_runs(options, grid(options, folder_of(options)))


def run(options: ImageNet, argv: Sequence[str]) -> Result | int:
    """The result, once every run has ended; else the exit code."""
    check(options)
    folder = folder_of(options)
    data = load_data("imagenet", folder, image_size=options.image_size, show=lambda _: None)
    code, entries = trained(grid(options, folder), options.runs / WHAT / folder.name, data, options, argv)
    if code:
        return code
    cells: dict[str, Callable[[], Any]] = {
        f"K = {label_of(entry.run.cell['K'])}": partial(measure, entry, data, options.torch_device) for entry in entries
    }
    return compute(WHAT, options, argv, cells, profiles=PROFILES, seed=options.seed, about=about_data(data))


def grid(options: ImageNet, folder: Path) -> list[Run]:
    """A run for each K, with the settings in appendix B.2 of the paper but for the sizes of images and schedule."""
    fixed = {"preset": "paper-imagenet", "epochs": options.epochs, "batch_size": options.batch_size}
    sizes = milestones(options.epochs, (1 / 3, 2 / 3)) | {"image_size": options.image_size}
    every = settings_of_all(options, options.seed, folder)
    return runs_of({"run": fixed | sizes | every, "grid": {"K": [*options.K]}})


def folder_of(options: ImageNet) -> Path:
    """The folder of images, which is made where none is given, and kept."""
    if options.images is not None:
        return options.images
    folder = options.runs / "images" / f"cifar10-{options.made}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
        data = load_data("cifar10", options.data_path, show=lambda _: None)
        write_images(data, part, options.made, options.made // 2, size=None)
        part.rename(folder)
    return folder


def measure(entry: Entry, data: Data, device: torch.device) -> dict[str, Any]:
    """What came of a run, and how often the right class is among the five that its network finds likeliest."""
    config = entry.run.config
    cell = cell_of(entry) | {"lr": config.lr, "s_init": config.s_init, "top5_accuracy": None}
    if entry.status == "finished":
        model = trained_in(entry.folder).model.to(device)
        logits, labels = logits_of(model, data.test_batches(TEST_BATCH, device))
        cell["top5_accuracy"] = among_the_first(logits, labels, TOP)
    return cell


def among_the_first(logits: Tensor, labels: Tensor, count: int) -> float:
    """The part of the images whose class is among the `count` of largest logits."""
    first = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return float((first == labels[:, None]).any(1).double().mean())
