"""`opnorm reproduce pretrained`: section 4.1 of the paper, how far bounds lie above the norms of trained kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from opnorm import ConvOperator, Exact, operators_of
from opnorm.lab.arguments import read_settings, read_shapes
from opnorm.lab.bench.contenders import CONTENDERS, Refused
from opnorm.lab.cli import UsageError, console_width
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.paper.cells import Result, compute
from opnorm.lab.paper.options import Options
from opnorm.lab.paper.page import reproduce

WHAT = "pretrained"
METHODS = {name: contender for name, contender in CONTENDERS.items() if contender.family != "package"}
PROFILES: dict[str, dict[str, Any]] = {"small": {}, "paper": {}}  # minutes on two cores: nothing is left out


@dataclass(frozen=True)
class Pretrained(Options):
    """Section 4.1: how far every method lies above the norms of the depthwise layers of a trained network.

    For example:
      opnorm reproduce pretrained --weights mobilenetv2.safetensors
      opnorm reproduce pretrained --model my_package.my_module:build --weights weights.safetensors --input 3,32,32
    """

    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The trained weights, with the names and shapes of the model, batch norm folded into the convolutions:
    .safetensors, or a state dict saved by torch."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "mobilenet_v2"
    """The network that says which layers there are, as in opnorm norms: a built-in name, or package.module:factory, or
    file.py:factory."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory, such as num_classes=10. May be repeated."""

    input: Annotated[str, tyro.conf.arg(metavar="SIZES")] = "3,224,224"
    """Channels and sizes of an image."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, draw."""
    return reproduce(WHAT, Pretrained, PROFILES, argv, run, show)


def check(options: Pretrained) -> None:
    """Refuse weights that are not there, or do not fit."""
    depthwise_layers(options)


def run(options: Pretrained, argv: Sequence[str]) -> Result:
    """The result, a layer a cell, as far as it was not computed before a kill."""
    layers = depthwise_layers(options)
    assert options.weights is not None
    about = {
        "sha256": hashlib.sha256(options.weights.read_bytes()).hexdigest(),
        "families": {name: contender.family for name, contender in METHODS.items()},
    }
    cells: dict[str, Callable[[], Any]] = {name: partial(measure, operator) for name, operator in layers.items()}
    return compute(WHAT, options, argv, cells, profiles=PROFILES, about=about)


def depthwise_layers(options: Pretrained) -> dict[str, ConvOperator]:
    """The depthwise layers of the network with its trained weights, in the order in which they are called."""
    if options.weights is None:
        raise UsageError(
            f"expected --weights FILE, the trained weights of {options.model} with batch norm folded, got none; "
            "random ones say nothing of a trained network"
        )
    if not options.weights.is_file():
        raise UsageError(f"expected --weights as a file, got {options.weights}, which is not there")
    (shape,) = read_shapes([options.input])
    if None in shape:
        raise UsageError(f"expected --input as numbers, since a norm depends on them, got {options.input}")
    model = build_model(options.model, read_settings(options.arg), seed=0)
    load_checkpoint(model, options.weights)
    found = operators_of(model.to(options.torch_device), shape)
    layers = {name: operator.detach() for name, operator in found.items() if operator.geometry.kind == "depthwise"}
    if not layers:
        raise UsageError(f"expected depthwise layers in {options.model}, got none; see opnorm norms {options.model}")
    return layers


@torch.no_grad()
def measure(operator: ConvOperator) -> dict[str, Any]:
    """The norm of a layer, and by how much each method lies above it; or why a method does not take the layer."""
    geometry = operator.geometry
    norm = float(Exact().compute(operator.to(torch.float64)).value)
    over: dict[str, float] = {}
    guarantee: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, contender in METHODS.items():
        try:
            trial = contender.prepare(operator)
        except Refused as reason:
            refused[name] = str(reason)
            continue
        for _ in range(trial.calls):  # what keeps a vector between the steps of a training is called as often
            bound = trial.call()
        over[name], guarantee[name] = float(bound) / norm - 1, bound.guarantee
    sizes = {"channels": geometry.in_channels, "kernel": geometry.kernel_size, "input": geometry.input_size}
    found = {**sizes, "stride": geometry.stride, "norm": norm, "over": over, "guarantee": guarantee}
    return found | {"refused": refused}


def show(result: Result) -> None:
    """Layer by layer: the paper's bound and ours."""
    names = ("Runkel2021", "FourierBound", "auto")
    table = Table("layer", "input", "stride", "norm", *names, title="overestimation")
    for layer, cell in result["cells"].items():
        sizes = ("×".join(map(str, cell[key])) for key in ("input", "stride"))
        over = (f"{cell['over'][name]:.3%}" if name in cell["over"] else "" for name in names)
        table.add_row(layer, *sizes, f"{cell['norm']:.4f}", *over)
    Console(width=console_width()).print(table)
