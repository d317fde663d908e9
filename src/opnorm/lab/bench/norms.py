"""`opnorm bench norms`: how far bounds lie above the norm in a trained network's depthwise layers, and their time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from opnorm import ConvOperator, Exact, FourierBound, auto, models, operators_of
from opnorm.lab.bench.timing import interleaved
from opnorm.lab.cli import console_width, parse
from opnorm.lab.loading import load_checkpoint
from opnorm.lab.record import environment, write_json
from opnorm.norms.baselines import Runkel2021

Operators = dict[str, ConvOperator]


@dataclass(frozen=True)
class Norms:
    """Overestimation and time of the depthwise layers of MobileNetV2 at 224×224: the paper's bound, ours, and auto.

    All published methods and other packages, on layers of other networks too: opnorm bench peers.

    For example:
      opnorm bench norms --weights mobilenetv2.safetensors --json results/norms_mobilenet_v2.json
    """

    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """MobileNetV2 with batch norm folded, .safetensors. Without it the weights are drawn at random."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the results."""

    rounds: int = 50
    """How often each method is timed."""

    seed: int = 0
    """For random weights."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    config = parse(Norms, argv, "opnorm bench norms")
    torch.manual_seed(config.seed)
    model = models.build("mobilenet_v2")
    if config.weights:
        load_checkpoint(model, config.weights)
    found = operators_of(model, (3, 224, 224))
    layers = {name: op.detach() for name, op in found.items() if op.geometry.kind == "depthwise"}
    rows = [_row(name, layers[name]) for name in track(layers, description="exact values", transient=True)]
    results = {
        "environment": environment(["bench", "norms", *argv], config.seed),
        "weights": config.weights and config.weights.name,
        "layers": rows,
        "overestimation": {f"stride {s}": _average([r for r in rows if r["stride"] == s]) for s in (1, 2)},
        "time": _time(list(layers.values()), config.rounds),
    }
    _show(results)
    if config.json:
        write_json(config.json, results)
    return 0


def _row(name: str, operator: ConvOperator) -> dict[str, Any]:
    geometry = operator.geometry
    truth = float(Exact().compute(operator.to(torch.float64)).value)
    methods = {"Runkel2021": Runkel2021(), "FourierBound": FourierBound(), "auto": auto(geometry)}
    methods["exact"] = auto(geometry, "exact")
    over = {key: float(method.compute(operator).value) / truth - 1 for key, method in methods.items()}
    row = {"name": name, "channels": geometry.in_channels, "input": geometry.input_size[0]}
    return row | {"stride": geometry.stride[0], "norm": truth, "overestimation": over}


def _average(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {key: [r["overestimation"][key] for r in rows] for key in rows[0]["overestimation"]}
    return {
        key: {"mean": statistics.fmean(v), "deviation": statistics.stdev(v), "largest": max(v)}
        for key, v in columns.items()
    }


def _time(layers: list[ConvOperator], rounds: int) -> dict[str, Any]:
    paper, ours = Runkel2021(), FourierBound()
    candidates = {
        "Runkel2021": lambda: [paper.compute(layer) for layer in layers],
        "FourierBound, one call": lambda: ours.compute_all(layers),
        "FourierBound, layer by layer": lambda: [ours.compute(layer) for layer in layers],
        "auto, layer by layer": lambda: [auto(layer.geometry).compute(layer) for layer in layers],
    }
    return interleaved(candidates, rounds, "all depthwise layers")


def _show(results: dict[str, Any]) -> None:
    table = Table("layer", "input", "stride", "norm", "Runkel2021", "FourierBound", "auto", title="overestimation")
    for row in results["layers"]:
        over = (f"{row['overestimation'][key]:.3%}" for key in ("Runkel2021", "FourierBound", "auto"))
        table.add_row(row["name"], str(row["input"]), str(row["stride"]), f"{row['norm']:.4f}", *over)
    for name, average in results["overestimation"].items():
        over = (f"{average[key]['mean']:.3%}" for key in ("Runkel2021", "FourierBound", "auto"))
        table.add_row(f"mean, {name}", "", "", "", *over, style="bold")
    console = Console(width=console_width())
    console.print(table)
    for name, times in results["time"].items():
        console.print(f"{name}: {1e3 * times['seconds']['median']:.1f} ms, {times['ratio']['median']:.2f} of the first")
