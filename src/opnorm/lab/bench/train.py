"""`opnorm bench train`: the throughput of the training loop, as a part of that of the bare step in the same process."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from opnorm.lab.bench.timing import interleaved, keep_memory
from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.data import Data, load_data
from opnorm.lab.record import environment, write_json
from opnorm.lab.train_config import Train, preset
from opnorm.lab.train_log import Logs
from opnorm.lab.train_loop import Trainer
from opnorm.lab.train_model import Network, build_network, build_optimizer
from opnorm.lab.train_parallel import fabric_for
from opnorm.lab.train_show import Screen

BARE, PLAIN, LOOP, DATA = "bare step", "the loop, --no-normalize", "the loop", "the data alone"
NORMALIZED = "bare step and Normalizer"


@dataclass(frozen=True)
class BenchTrain:
    """Steps of the training loop, with data, augmentation, logs and Normalizer, beside bare steps, in turn.

    A bare step is forward, backward and optimizer on one batch that is in memory already; same network, same layout.

    For example:
      opnorm bench train --json results/train_digits.json
      opnorm bench train --preset paper-cifar10 --data-path cifar-10-batches-bin --json results/train_cifar10.json
    """

    preset: Literal["digits", "paper-cifar10"] = "digits"
    """Which run: ds_convnet on the digits, or ds_resnet34 on CIFAR-10, as `opnorm train` has it."""

    data_path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Where CIFAR-10 is: a folder or an archive."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory. May be repeated."""

    batch_size: int | None = None
    """Another batch size."""

    rounds: int = 15
    """How often each candidate is timed."""

    steps: int = 5
    """How many steps are timed at once."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """Where to train."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the results."""

    seed: int = 0
    """For weights, order and augmentation."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse(BenchTrain, argv, "opnorm bench train")
    config = _config(options)
    if options.device == "cpu":
        keep_memory(["bench", "train", *argv])
    data = load_data(config.data, config.data_path)
    if len(data.train.labels) < config.batch_size:
        raise UsageError(f"expected --batch-size of at most {len(data.train.labels)}, got {config.batch_size}")
    with _logged() as logs:
        candidates = _candidates(config, data, logs)
        taken = {name: _steps(source, options.steps) for name, source in candidates.items()}
        times = interleaved(taken, options.rounds, options.preset)
    results = {
        "environment": environment(["bench", "train", *argv], config.seed),
        "config": config.to_dict(),
        "data": {"name": data.name, "notes": data.notes, "training": len(data.train.labels)},
        "batch": config.batch_size,
        "steps_a_round": options.steps,
        "times": times,
    }
    _show(results)
    if options.json is not None:
        write_json(options.json, results)
    return 0


@dataclass(frozen=True)
class Logged:
    """Where loops write what they would write in a run: a folder, and a terminal that nobody looks at."""

    folder: Path
    console: Console
    opened: list[Logs]


@contextlib.contextmanager
def _logged() -> Iterator[Logged]:
    """Gone afterwards. The bar has every step's numbers, and is not drawn: that would take from the others' time."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Logged(Path(folder), Console(file=io.StringIO(), force_terminal=True), [])
        try:
            yield logs
        finally:
            for own in logs.opened:
                own.close()


def _config(options: BenchTrain) -> Train:
    """The settings of the run; one that would never end, at the learning rate that its preset begins with."""
    for name, least in (("rounds", 2), ("steps", 1), ("batch_size", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"expected --{name.replace('_', '-')} of at least {least}, got {value}")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise UsageError(f"expected --json as a file in a folder that exists, got {options.json}")
    usual = preset(options.preset, Train.K if options.preset == "digits" else 5.0)
    return replace(
        usual, data_path=options.data_path, arg=options.arg, batch_size=options.batch_size or usual.batch_size,
        device=options.device, seed=options.seed, schedule="constant", milestones=(), lr=usual.lr / 25,
    )  # fmt: skip


def _candidates(config: Train, data: Data, logs: Logged) -> dict[str, Iterator[object]]:
    """{name: an iterator that takes a step whenever it is asked for the next item}."""
    fabric = fabric_for(config)
    data, plain = data.to(fabric.device), replace(config, normalize=False)
    x, y = next(data.training_batches(0, config.batch_size, config.seed, fabric.device))

    def bare(settings: Train) -> Iterator[None]:
        return _bare(settings, build_network(settings, data, fabric.device), x, y)

    def loop(settings: Train) -> Iterator[None]:
        network = build_network(settings, data, fabric.device)
        screen = Screen(settings.epochs, data.steps(settings.batch_size), console=logs.console)
        path = logs.folder / f"{settings.normalize}"
        path.mkdir()
        trainer = Trainer(settings, data, network, fabric, path / "checkpoint.pt", screen)
        trainer.watcher = own = Logs(path, trainer.progress, screen)
        logs.opened.append(own)
        return whole_batches(trainer)

    batches = _batches(config, data, fabric.device)
    return {BARE: bare(plain), PLAIN: loop(plain), NORMALIZED: bare(config), LOOP: loop(config), DATA: batches}


def _steps(source: Iterator[object], count: int) -> Callable[[], object]:
    """Take so many steps."""
    return lambda: [None for _ in islice(source, count)]


def _bare(config: Train, network: Network, x: Tensor, y: Tensor) -> Iterator[None]:
    """Forward, backward and optimizer, as somebody would write them who measures nothing."""
    model: nn.Module = network.model.train()
    optimizer = build_optimizer(config, network)
    while True:
        optimizer.zero_grad()
        F.cross_entropy(model(x) * config.logit_scale, y).backward()
        optimizer.step()
        if network.normalizer is not None:
            network.normalizer.step()
        yield


def whole_batches(trainer: Trainer) -> Iterator[None]:
    """The steps of the loop, but for the last of an epoch, whose batch is smaller; evaluation is no step."""
    progress, config = trainer.progress, trainer.config
    whole = len(trainer.data.train.labels) // config.batch_size
    while True:
        for _ in islice(trainer.steps_of_epoch(), whole):
            yield
        progress.epoch, progress.batch = progress.epoch + 1, 0


def _batches(config: Train, data: Data, device: torch.device) -> Iterator[Tensor]:
    """The batches alone."""
    whole, epoch = len(data.train.labels) // config.batch_size, 0
    while True:
        for x, _ in islice(data.training_batches(epoch, config.batch_size, config.seed, device), whole):
            yield x
        epoch += 1


def _show(results: dict[str, Any]) -> None:
    name = f"{results['config']['model']} on {results['data']['name']}, batches of {results['batch']}"
    table = Table("steps", "ms", "images/s", "time/bare", "quartiles", "part of the bare throughput", title=name)
    for what, cell in results["times"].items():
        step, ratio = cell["seconds"]["median"] / results["steps_a_round"], cell["ratio"]
        spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        part = "" if what in (BARE, DATA) else f"{1 / ratio['median']:.1%}"
        table.add_row(
            what, f"{1e3 * step:.2f}", f"{results['batch'] / step:,.0f}", f"{ratio['median']:.3f}", spread, part
        )
    Console(width=console_width(), highlight=False).print(table)
