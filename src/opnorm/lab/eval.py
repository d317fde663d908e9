"""`opnorm eval`: accuracy, certified accuracy, confusion matrix and certificate of a trained network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from opnorm.certify import Certificate
from opnorm.lab.certify import show_shares
from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.data import Data, load_data
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.record import environment, plain, write_json, write_text
from opnorm.lab.train_config import Train
from opnorm.lab.train_model import factory_settings, require_logits
from opnorm.lab.train_page import LARGEST, run_page
from opnorm.lab.train_parallel import fabric_for
from opnorm.lab.train_report import facts_of, measured, summary
from opnorm.lab.trained import Trained, is_run, run_or_model

PROGRAM = "opnorm eval"


@dataclass(frozen=True)
class Eval:
    """Accuracy, certified accuracy, confusion matrix and certificate of a trained network, on test images.

    For example:
      opnorm eval runs/NAME --radii 0.05 0.1 --html evaluation.html
      opnorm eval runs/NAME --data-path other/images
      opnorm eval ds_resnet34 --checkpoint weights.safetensors --data cifar10 --data-path cifar-10-batches-bin
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The folder that `opnorm train` wrote; or a model, a built-in name, package.module:factory or file.py:factory."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The weights of a model: a .safetensors file, or a state dict saved by torch."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory. May be repeated."""

    data: Literal["digits", "cifar10", "fashion-mnist", "imagenet", "folder"] | None = None
    """The data set; without it that of the run, or the digits."""

    data_path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Where it is: a folder or an archive."""

    image_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """For folders of images: crop to N×N pixels."""

    radii: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="R")] = None
    """Radii of the certified accuracy: Euclidean, of images whose pixels go from 0 to 1. Without this those of the
    run."""

    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a page that holds everything and loads nothing."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all numbers, with the environment."""

    full: bool = False
    """Show all rows of the certificate; by default those that were folded into others are left out."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto: on a GPU where there is one."""

    workers: int = 0
    """Threads that read images from files; 0: one for each core."""


def main(argv: Sequence[str]) -> int:
    """Run `opnorm eval`."""
    config = parse(Eval, argv, PROGRAM)
    _check(config)
    run = run_or_model(config.run)
    data = _data(config, run)
    model = run.model if run else _model(config, data)
    device = fabric_for(Train(device=config.device)).device
    radii = config.radii if config.radii is not None else run.config.radii if run else Train.radii
    found, certificate = measured(model.to(device), data.to(device), radii, config.workers)
    result = _result(config, run, data, model) | found | {"environment": environment(["eval", *argv])}
    proof = certificate.to_dict() if certificate else None
    if config.html is not None:
        write_text(config.html, run_page(plain(result), plain(proof)))
    if config.json is not None:
        write_json(config.json, {k: v for k, v in result.items() if k != "history"} | {"certificate": proof})
    _show(config, result, certificate, data)
    return 0


def _check(config: Eval) -> None:
    """What can be wrong is said before anything is computed."""
    if is_run(Path(config.run)) and (config.checkpoint or config.arg):
        raise UsageError(f"expected --checkpoint and --arg with a model, got them with the run {config.run}")
    if config.radii is not None and any(not 0 <= r < math.inf for r in config.radii):
        raise UsageError(f"expected --radii of at least 0 and finite, got {' '.join(map(str, config.radii))}")
    if config.workers < 0:
        raise UsageError(f"expected --workers of at least 0, got {config.workers}")
    for name, path in (("--html", config.html), ("--json", config.json)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"expected {name} as a file in a folder that exists, got {path}")


def _data(config: Eval, run: Trained | None) -> Data:
    """The data set that is asked for, else that of the run, as the network of the run has to get it."""
    stored = run.config if run else Train()
    same = config.data in (None, stored.data)
    path = config.data_path or (stored.data_path if same else None)
    size = config.image_size or (stored.image_size if same else None)
    data = load_data(config.data or stored.data, path, image_size=size)
    if run is None:
        return data
    if data.shape != run.shape:
        shapes = ("×".join(map(str, shape)) for shape in (run.shape, data.shape))
        raise UsageError("expected images of {}, on which the network was trained, got {}".format(*shapes))
    if data.classes != run.classes:
        names = (", ".join(classes[:5]) for classes in (run.classes, data.classes))
        raise UsageError("expected the classes that the network was trained on, {}, …, got {}, …".format(*names))
    return replace(data, mean=run.mean, std=run.std)


def _model(config: Eval, data: Data) -> nn.Module:
    settings = factory_settings(Train(model=config.run, arg=config.arg), len(data.classes), data.shape)
    model = build_model(config.run, settings, seed=0).eval()
    if config.checkpoint is not None:
        load_checkpoint(model, config.checkpoint)
    require_logits(model, config.run, data)
    return model


def _result(config: Eval, run: Trained | None, data: Data, model: nn.Module) -> dict[str, Any]:
    """What is known beside the measurements; the curves of a run are of its own data alone."""
    facts: dict[str, Any] = {"status": "finished", "data": facts_of(data), "evaluated": config.run}
    if run is None:
        parameters = sum(p.numel() for p in model.parameters())
        return {"model": config.run, "checkpoint": config.checkpoint, "parameters": parameters} | facts
    own = config.data is None and config.data_path is None
    left = {"resumed", "ended"} if own else {"resumed", "ended", "history"}
    kept = {k: v for k, v in run.result.items() if k not in left}
    return kept | facts | {"trained_by": run.result["environment"]["command"]}


def _show(config: Eval, result: dict[str, Any], certificate: Certificate | None, data: Data) -> None:
    console = Console(width=console_width(), highlight=False)
    if certificate is not None:
        show_shares(console, certificate, full=config.full)
        console.print()
    if len(data.classes) <= LARGEST:
        console.print(_confusion(result["confusion"], data.classes))
        console.print()
    for note in data.notes:
        console.print(f"{data.name}: {note}", markup=False)
    if config.checkpoint is None and "checkpoint" in result:
        console.print("weights as built, seed 0", markup=False)
    for line in summary(result, data):
        console.print(line, markup=False)
    for path in (config.html, config.json):
        if path is not None:
            console.print(f"written to {path}", markup=False)


def _confusion(rows: Sequence[Sequence[int]], classes: Sequence[str]) -> Table:
    """Rows: what the images show; columns: what the network says."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("shown", *classes):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in zip(classes, rows, strict=True):
        table.add_row(name, *(str(n) if n else "·" for n in row))
    return table
