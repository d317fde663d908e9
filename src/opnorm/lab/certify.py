"""`opnorm certify`: a bound of the Lipschitz constant of a whole network, as a table, a page and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from opnorm.certify import Certificate, LayerShare, above, certify
from opnorm.lab.arguments import read_settings, read_shapes
from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.record import environment, write_json, write_text

PROGRAM = "opnorm certify"


@dataclass(frozen=True)
class Certify:
    """An upper bound of the Lipschitz constant of a network, a lower bound beside it, and where it comes from.

    For example:
      opnorm certify mobilenet_v2 --input 3,224,224 --html report.html
      opnorm certify my_package.my_module:build --input 3,32,32 --checkpoint weights.safetensors --json certificate.json
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A built-in name, or package.module:factory, or file.py:factory; modules in the current directory are found."""

    input: Annotated[str, tyro.conf.arg(metavar="SIZES")]
    """Shape of an input without batch, as 3,224,224; `any` for a size that may be any."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Weights: a .safetensors file, or a state dict saved by torch. Nothing else is unpickled."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .safetensors file, or a torch file of tensors alone, with `inputs` (n, *input), where the lower bound is looked
    for, and `labels` (n,), for which the certified accuracy is given. Without it the inputs are Gaussian noise."""

    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a page that holds everything and loads nothing."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all numbers, with the environment."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory, such as num_classes=10. May be repeated."""

    ord: Literal["1", "2", "inf"] = "2"
    """The norm of input and output."""

    composition: Literal["merged", "product"] = "merged"
    """merged: consecutive linear maps are merged where that is tighter; product: the plain product of all constants."""

    samples: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """From how many inputs to look for a large Jacobian norm; 0 leaves the lower bound out."""

    epsilons: Annotated[tuple[float, ...], tyro.conf.arg(metavar="E")] = (0.0, 36 / 255, 72 / 255, 108 / 255)
    """The radii of the certified accuracy."""

    seed: int = 0
    """For weights that a factory draws, and for the search of the lower bound."""

    full: bool = False
    """Show all rows; by default those that were folded into others are left out."""


def main(argv: Sequence[str]) -> int:
    """Run `opnorm certify`."""
    config = parse(Certify, argv, PROGRAM)
    _check_outputs(config)
    (shape,) = read_shapes([config.input])
    model = build_model(config.model, read_settings(config.arg), config.seed)
    if config.checkpoint is not None:
        load_checkpoint(model, config.checkpoint)
    data = _data(config.data) if config.data is not None else {}
    try:
        certificate = certify(
            model,
            shape,
            ord=float(config.ord),
            composition=config.composition,
            lower=config.samples > 0,
            seed=config.seed,
            inputs=data["inputs"][: config.samples] if data else config.samples,
        )
        accuracy = _accuracy(certificate, model, data, config.epsilons)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if config.html is not None:
        write_text(config.html, certificate.to_html())
    if config.json is not None:
        report = {"environment": environment(["certify", *argv], config.seed), "certified_accuracy": accuracy}
        write_json(config.json, certificate.to_dict() | report)
    _show(certificate, accuracy, config)
    return 0


def _check_outputs(config: Certify) -> None:
    """What can be wrong is said before anything is computed."""
    if config.samples < 0:
        raise UsageError(f"expected --samples of at least 0, got {config.samples}")
    if not all(epsilon >= 0 for epsilon in config.epsilons):
        raise UsageError(f"expected --epsilons of at least 0, got {' '.join(map(str, config.epsilons))}")
    for name, path in (("--html", config.html), ("--json", config.json)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"expected {name} as a file in a folder that exists, got {path}")


def _data(path: Path) -> dict[str, Tensor]:
    from opnorm.lab.loading import _read

    content = _read(path)
    if not isinstance(content, dict) or not isinstance(content.get("inputs"), Tensor) or len(content["inputs"]) == 0:
        raise UsageError(f"expected --data with a tensor `inputs` of at least one sample, got {path} without it")
    labels = content.get("labels")
    if labels is not None and not isinstance(labels, Tensor):
        raise UsageError(f"expected --data with `labels` as a tensor, got {type(labels).__name__} in {path}")
    if labels is not None and len(labels) != len(content["inputs"]):
        raise UsageError(f"expected as many labels as inputs, got {len(labels)} and {len(content['inputs'])} in {path}")
    return content


def _accuracy(
    certificate: Certificate, model: nn.Module, data: dict[str, Tensor], epsilons: Sequence[float]
) -> dict[float, float] | None:
    if "labels" not in data:
        return None
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    batches = zip(data["inputs"].to(dtype).split(256), data["labels"].split(256), strict=True)
    return certificate.certified_accuracy(model, batches, epsilons)


def _show(certificate: Certificate, accuracy: dict[float, float] | None, config: Certify) -> None:
    console = Console(width=console_width(), highlight=False)
    head, _, _ = str(certificate).partition("\n\n")
    console.print(head, markup=False)
    if config.checkpoint is None:
        console.print(f"weights as built, seed {config.seed}", markup=False)
    show_shares(console, certificate, full=config.full)
    for epsilon, part in (accuracy or {}).items():
        console.print(f"certified accuracy at radius {epsilon:.4g}: {part:.2%}", markup=False)
    for path in (config.html, config.json):
        if path is not None:
            console.print(f"written to {path}", markup=False)


def show_shares(console: Console, certificate: Certificate, *, full: bool) -> None:
    """The rows of a certificate as a table; without `full` those that were folded into others are left out."""
    rows = [r for r in certificate.layers if full or not r.note.startswith(("folded", "merged"))]
    console.print(_table(rows))
    if len(rows) < len(certificate.layers):
        console.print(
            f"{len(certificate.layers) - len(rows)} rows that were folded into these are shown by --full", markup=False
        )


def _table(rows: Sequence[LayerShare]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("layer", "operation", "alone", "share", "saving", "bound so far", "guarantee", "note"):
        right: Any = {"justify": "right"} if title in ("alone", "share", "saving", "bound so far") else {}
        table.add_column(title, no_wrap=title != "note", **right)
    for row in rows:
        saving = f"{row.saving:.1%}" if row.saving > 5e-4 else ""
        note = "; ".join(part for part in (row.method, row.note) if part)
        table.add_row(
            row.name, row.op, f"{row.alone:.4g}", f"{row.value:.4g}", saving, above(row.total, 5), row.guarantee, note
        )
    return table
