"""`opnorm reproduce timing`: table 2 of the paper, an epoch with and without normalisation, data loading included."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from opnorm.lab.bench.step import normalized_by_layer, paper_methods
from opnorm.lab.bench.timing import interleaved, keep_memory
from opnorm.lab.bench.train import whole_batches
from opnorm.lab.cli import UsageError, console_width
from opnorm.lab.data import Data, load_data
from opnorm.lab.paper.cells import Result, compute
from opnorm.lab.paper.image_folder import write_images
from opnorm.lab.paper.options import WithImages, require_images
from opnorm.lab.paper.page import reproduce
from opnorm.lab.paper.timing_page import BARE, OURS, PAPER
from opnorm.lab.train_config import Train, preset
from opnorm.lab.train_loop import Progress, Record, Trainer
from opnorm.lab.train_model import build_network
from opnorm.lab.train_parallel import fabric_for

WHAT = "timing"
RATE = 1e-4  # no run diverges, and power iteration stops where it started: the best that the paper's method can have
PROFILES: dict[str, dict[str, Any]] = {
    "small": {"cifar_batch": 128, "imagenet_batch": 16, "rounds": 60},
    "paper": {"cifar_batch": 128, "imagenet_batch": 128, "rounds": 100},
}


@dataclass(frozen=True)
class Timing(WithImages):
    """Table 2: training steps with and without normalisation, data loading included, in turn in one process.

    For example:
      opnorm reproduce timing --data-path cifar-10-batches-bin
      opnorm reproduce timing --profile paper --data-path cifar-10-batches-bin --images imagenet --device cuda
    """

    made: int = 640
    """How many JPEG files of 500×375 pixels are made for MobileNetV2, where --images is not given."""

    cifar_batch: int = 128
    """Images in a step of ds_resnet34."""

    imagenet_batch: int = 16
    """Images in a step of MobileNetV2."""

    rounds: int = 60
    """How many steps of each candidate are timed, after two that are not."""

    image_size: int = 224
    """For MobileNetV2: crop to N×N pixels."""

    seed: int = 0
    """For weights, order and augmentation."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, draw."""
    return reproduce(WHAT, Timing, PROFILES, argv, run, show)


def check(options: Timing) -> None:
    """Refuse data that are not there, or too few for a step."""
    for name, least in (("rounds", 2), ("made", 20), ("cifar_batch", 1), ("imagenet_batch", 1), ("image_size", 8)):
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise UsageError(f"expected --{flag} of at least {least}, got {getattr(options, name)}")
    require_images(options)
    found = {"cifar_batch": len(load_data("cifar10", options.data_path, show=_nothing).train.labels)}
    found["imagenet_batch"] = options.made
    if options.images is not None:
        found["imagenet_batch"] = len(load_data("imagenet", options.images, show=_nothing).train.labels)
    for name, count in found.items():
        if getattr(options, name) > count:
            raise UsageError(f"expected --{name.replace('_', '-')} of at most {count}, got {getattr(options, name)}")


def run(options: Timing, argv: Sequence[str]) -> Result:
    """The result, a network a cell, as far as it was not measured before a kill."""
    check(options)
    if options.torch_device.type == "cpu":
        keep_memory(argv)
    cells: dict[str, Callable[[], Any]] = {
        "ds_resnet34": partial(measure_cifar, options),
        "mobilenet_v2": partial(measure_imagenet, options),
    }
    return compute(WHAT, options, argv, cells, profiles=PROFILES, seed=options.seed)


def measure_cifar(options: Timing) -> dict[str, Any]:
    """ds_resnet34 on CIFAR-10, hard scaling with K = 5, as in appendix B.3 of the paper."""
    config = _config(options, "paper-cifar10", 5.0, options.cifar_batch)
    return measure(config, load_data("cifar10", options.data_path, show=_nothing), options.rounds)


def measure_imagenet(options: Timing) -> dict[str, Any]:
    """MobileNetV2 on files of images, soft scaling; K = 3, with which the untrained network's signal stays in range."""
    config = _config(options, "paper-imagenet", 3.0, options.imagenet_batch)
    with tempfile.TemporaryDirectory() as made:
        folder, note = options.images or Path(made), ""
        if options.images is None:
            note = write_images(load_data("cifar10", options.data_path, show=_nothing), folder, options.made)
        data = load_data("imagenet", folder, image_size=options.image_size, show=_nothing)
        return measure(config, replace(data, notes=(note,) if note else ()), options.rounds)


def measure(config: Train, data: Data, rounds: int) -> dict[str, Any]:
    """Steps of the three, in turn, and the epochs that follow from them."""
    loops = {name: whole_batches(trainer) for name, trainer in trainers(config, data).items()}
    times = interleaved({name: partial(next, loop) for name, loop in loops.items()}, rounds, config.model)
    images = len(data.train.labels)
    steps_of_epoch = images / config.batch_size  # the last of which is a part of one
    epoch = {name: {q: s * steps_of_epoch for q, s in time["seconds"].items()} for name, time in times.items()}
    described = {"name": data.name, "images": images, "shape": data.shape, "notes": data.notes}
    settings = {"K": config.K, "scaling": config.scaling, "batch": config.batch_size}
    return {"data": described, **settings, "steps of an epoch": steps_of_epoch, "step": times, "epoch": epoch}


def trainers(config: Train, data: Data) -> dict[str, Trainer]:
    """The same run without normalisation, with ours, and with the paper's method after each step of the optimizer."""
    fabric, found, limit = fabric_for(config), {}, config.K
    data = data.to(fabric.device)
    for name in (BARE, OURS, PAPER):
        settings = replace(config, normalize=name == OURS)
        network = build_network(settings, data, fabric.device)
        found[name] = Trainer(settings, data, network, fabric, Path("unwritten"), Nobody())
        if name == OURS and network.K_per == "pair":
            limit = config.K**0.5  # of each layer of a pair
        if name == PAPER:
            normalize = normalized_by_layer(network.model, data.shape, limit, paper_methods())
            normalize()
            found[name].inner.register_step_post_hook(lambda *_, normalize=normalize: normalize())
    return found


class Nobody:
    """A watcher of a run that nobody watches."""

    def stepped(self, progress: Progress, images: int) -> None:
        """Nothing."""

    def evaluated(self, record: Record) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Nothing."""


def _config(options: Timing, published: str, K: float, batch: int) -> Train:
    """The published run, on this machine, at a rate that moves little, without checkpoints."""
    return replace(
        preset(published, K), K=K, batch_size=batch, seed=options.seed, device=options.device, lr=RATE,
        schedule="constant", milestones=(), checkpoint_every=float("inf"),
    )  # fmt: skip


def _nothing(text: str) -> None:
    """Show nothing."""


def show(result: Result) -> None:
    """Epochs and factors."""
    table = Table("network", "", "seconds of an epoch", "factor", "quartiles", title="table 2")
    for network, cell in result["cells"].items():
        for name, time in cell["step"].items():
            ratio = time["ratio"]
            spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            table.add_row(network, name, f"{cell['epoch'][name]['median']:.1f}", f"{ratio['median']:.3f}", spread)
    Console(width=console_width()).print(table)
