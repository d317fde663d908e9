"""`opnorm bench small`: small inputs and large kernels of trained networks, where the embedding alone is loose."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from opnorm import ConvGeometry, ConvOperator, Exact, FourierBound, auto
from opnorm.lab.bench.timing import interleaved
from opnorm.lab.cli import console_width, parse
from opnorm.lab.record import environment, write_json

SIZES = (2, 3, 5, 7, 10, 14, 17, 20)
KERNELS = ((3, 3), (5, 5), (7, 7), (1, 7), (7, 1))
STRIDES = ((1, 1), (2, 1), (2, 2))


@dataclass(frozen=True)
class Small:
    """Depthwise kernels trained on scikit-learn's digits, on inputs of 2 to 20 pixels: FourierBound beside auto.

    For example:
      opnorm bench small --json results/norms_small.json
    """

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the results."""

    channels: int = 256
    """Channels of the depthwise layers that are trained."""

    steps: int = 300
    """Training steps."""

    rounds: int = 10
    """How often each case is timed."""

    seed: int = 0
    """For the initial weights and the batches."""


def main(argv: Sequence[str]) -> int:
    """Train, measure, print, write."""
    config = parse(Small, argv, "opnorm bench small")
    trained, accuracy = {}, {}
    for kernel in track(KERNELS, description="training", transient=True):
        trained[kernel], accuracy[f"{kernel[0]}×{kernel[1]}"] = _train(kernel, config)
    cases = [(n, k, s) for n in SIZES for k in KERNELS for s in STRIDES]
    rows = [
        row
        for n, kernel, stride in track(cases, description="cases", transient=True)
        for layer, weight in enumerate(trained[kernel])
        for row in _rows(weight, n, kernel, stride, layer, config.rounds)
    ]
    results = {
        "environment": environment(["bench", "small", *argv], config.seed),
        "training_accuracy": accuracy,
        "by_size": {str(n): _summary([r for r in rows if r["input"] == n]) for n in SIZES},
        "all": _summary(rows),
        "cases": rows,
    }
    _show(results)
    if config.json:
        write_json(config.json, results)
    return 0


def _train(kernel: tuple[int, int], config: Small) -> tuple[list[Tensor], float]:
    """The weights of two depthwise layers of a small classifier, and its accuracy on what it was trained on."""
    from sklearn.datasets import load_digits

    torch.manual_seed(config.seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    c = config.channels
    depthwise = [nn.Conv2d(c, c, kernel, padding="same", groups=c) for _ in range(2)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * c, 10))
    mix = [
        nn.Conv2d(1, c, 1),
        nn.ReLU(),
        depthwise[0],
        nn.ReLU(),
        nn.Conv2d(c, c, 1),
        nn.ReLU(),
        depthwise[1],
        nn.ReLU(),
    ]
    model = nn.Sequential(*mix, nn.Conv2d(c, c, 1), nn.ReLU(), head)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(config.steps):
        batch = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return [layer.weight.detach() for layer in depthwise], accuracy


def _rows(
    weight: Tensor, n: int, kernel: tuple[int, int], stride: tuple[int, int], layer: int, rounds: int
) -> list[dict[str, Any]]:
    """Centred padding, and where the stride is more than 1 also TensorFlow's, which puts the larger half at the end."""
    centred = tuple((k // 2, k // 2) for k in kernel)
    last = tuple(_tensorflow(n, k, s) for k, s in zip(kernel, stride, strict=True))
    rows = []
    for padding in dict.fromkeys((centred, last)):
        c = len(weight)
        geometry = ConvGeometry(c, c, kernel, (n, n), stride=stride, padding=padding, groups=c)
        operator = ConvOperator(geometry, weight)
        truth = float(Exact().compute(operator.to(torch.float64)).value)
        embedding, chosen = FourierBound(), auto(geometry)
        methods = {"FourierBound": embedding, "all channels in full": FourierBound(finalists=None), "auto": chosen}
        candidates = {name: partial(method.compute, operator) for name, method in methods.items()}
        times = interleaved(candidates, rounds)
        rows.append(
            {"input": n, "kernel": kernel, "stride": stride, "padding": padding, "layer": layer, "norm": truth}
            | {"FourierBound": float(embedding.compute(operator).value) / truth - 1}
            | {"auto": float(chosen.compute(operator).value) / truth - 1}
            | {"seconds": {name: t["seconds"]["median"] for name, t in times.items()}}
        )
    return rows


def _tensorflow(n: int, kernel: int, stride: int) -> tuple[int, int]:
    """Padding such that the output has ⌈n/s⌉ elements, the odd one at the end."""
    total = max(0, (-(-n // stride) - 1) * stride + kernel - n)
    return total // 2, total - total // 2


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"cases": len(rows)}
    for name in ("FourierBound", "auto"):
        over = [r[name] for r in rows]
        summary[name] = {"mean": statistics.fmean(over), "largest": max(over)}
        summary[name]["seconds"] = sum(r["seconds"][name] for r in rows)
    full = sum(r["seconds"]["all channels in full"] for r in rows)
    summary["cost"] = {"FourierBound": summary["auto"]["seconds"] / summary["FourierBound"]["seconds"]}
    summary["cost"]["all channels in full"] = summary["auto"]["seconds"] / full
    return summary


def _show(results: dict[str, Any]) -> None:
    columns = ("input", "cases", "FourierBound", "largest", "auto", "largest", "× FourierBound", "× all in full")
    table = Table(*columns, title="overestimation, and the time of auto")
    for name, s in (results["by_size"] | {"all": results["all"]}).items():
        over = (f"{s[m][key]:.3%}" for m in ("FourierBound", "auto") for key in ("mean", "largest"))
        table.add_row(name, str(s["cases"]), *over, *(f"{cost:.2f}" for cost in s["cost"].values()))
    Console(width=console_width()).print(table)
