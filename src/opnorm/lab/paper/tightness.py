"""`opnorm reproduce tightness`: figure 2 of the paper, how far the bounds of Gaussian kernels lie above the norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from opnorm import ConvGeometry, ConvOperator, FourierBound, auto
from opnorm.bound import Method
from opnorm.lab.cli import console_width
from opnorm.lab.data import generator
from opnorm.lab.paper.cells import Result, compute
from opnorm.lab.paper.options import Options
from opnorm.lab.paper.page import reproduce
from opnorm.lab.paper.truth import enclosed_norms, one_channel_each
from opnorm.norms.baselines import Runkel2021

WHAT = "tightness"
ITERATIONS = 30  # of the power method, in the paper's reference


@dataclass(frozen=True)
class Family:
    """Kernels of one kind, and which of the options names the sizes of their inputs."""

    dim: int
    kernel: int
    stride: int
    sizes: str


FAMILIES = {
    "3×3": Family(2, 3, 1, "sizes"),
    "5×5": Family(2, 5, 1, "larger"),
    "7×7": Family(2, 7, 1, "larger"),
    "3×3, stride 2": Family(2, 3, 2, "larger"),
    "3×3×3": Family(3, 3, 1, "volumes"),
}
SPREAD = (7, 10, 14, 20, 28, 40, 56, 80, 112, 128)
PROFILES: dict[str, dict[str, Any]] = {
    "small": {"sizes": SPREAD, "larger": (7, 14, 28, 56), "volumes": (5, 7, 10, 14)},
    "paper": {"sizes": tuple(range(7, 129)), "larger": SPREAD, "volumes": (5, 7, 10, 14, 20)},
}


@dataclass(frozen=True)
class Tightness(Options):
    """Figure 2: overestimation of the norms of Gaussian kernels by the paper's bound, and by ours, on inputs of N^d.

    For example:
      opnorm reproduce tightness
      opnorm reproduce tightness --profile paper --device cuda
    """

    kernels: int = 1000
    """How many kernels for each size."""

    sizes: tuple[int, ...] = SPREAD
    """The sizes N for 3×3 kernels."""

    larger: tuple[int, ...] = SPREAD
    """The sizes N for 5×5 and 7×7 kernels, and for 3×3 with stride 2."""

    volumes: tuple[int, ...] = (5, 7, 10, 14)
    """The sizes N for 3×3×3 kernels."""

    seed: int = 0
    """For the kernels, and where the power method starts."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, draw."""
    return reproduce(WHAT, Tightness, PROFILES, argv, run, show)


def run(options: Tightness, argv: Sequence[str]) -> Result:
    """The result, as far as it was not computed before a kill."""
    cells: dict[str, Callable[[], Any]] = {
        f"{name}, N = {n}": partial(measure, name, n, options)
        for name, family in FAMILIES.items()
        for n in getattr(options, family.sizes)
    }
    return compute(WHAT, options, argv, cells, profiles=PROFILES, seed=options.seed)


def measure(name: str, n: int, options: Tightness) -> dict[str, Any]:
    """Median and quartiles over the kernels of one family on inputs of n^d."""
    family, random = FAMILIES[name], generator(options.seed, WHAT, name, n)
    geometry = ConvGeometry(
        1, 1, (family.kernel,) * family.dim, (n,) * family.dim, stride=family.stride, padding=family.kernel // 2
    )
    kernels = torch.randn(options.kernels, *geometry.weight_shape[1:], generator=random, dtype=torch.float64)
    operator = one_channel_each(geometry, kernels.to(options.torch_device))
    start = torch.randn(operator.geometry.shapes[0], generator=random, dtype=torch.float64).to(options.torch_device)
    truth = enclosed_norms(operator)
    bounds = {
        "paper": _each(Runkel2021(), operator),
        "FourierBound": _each(FourierBound(finalists=None), operator),
        "auto": _automatic(geometry, operator),
    }
    reference = iterated(operator, start)
    found = {"family": name, "N": n, "truth apart": float((truth.upper / truth.lower - 1).max())}
    found |= {key: _summary(bound / truth.lower - 1) for key, bound in bounds.items()}
    found["reference"] = _summary(reference / truth.lower - 1)
    found["paper to reference"] = _summary(bounds["paper"] / reference - 1)
    if family.stride == 1:
        found["paper to K alone"] = _summary(bounds["paper"] / iterated(operator, start, adjoint=False) - 1)
    ratio = bounds["FourierBound"] / bounds["paper"]
    found["FourierBound to paper"] = _summary(ratio - 1) | {"above": float((ratio > 1).double().mean())}
    return found


def iterated(operator: ConvOperator, start: Tensor, adjoint: bool = True) -> Tensor:
    """The paper's reference, √‖v‖ after 30 times v ← KᵀKv/‖v‖, each channel by itself; without the adjoint v ← Kv/‖v‖.

    The latter is no norm unless K is symmetric. It is what comes out where the adjoint is forgotten.
    """
    within = tuple(range(1, start.dim()))
    v = start
    for _ in range(ITERATIONS):
        image = operator.matvec(v / torch.linalg.vector_norm(v, dim=within, keepdim=True))
        v = operator.rmatvec(image) if adjoint else image
    size = torch.linalg.vector_norm(v, dim=within)
    return size.sqrt() if adjoint else size


def _each(method: Method, operator: ConvOperator) -> Tensor:
    bound = method.compute(operator).per_channel
    assert bound is not None
    return bound


def _automatic(geometry: ConvGeometry, operator: ConvOperator) -> Tensor:
    """What `auto` says of a layer of one channel, for each channel."""
    method = auto(geometry)
    if isinstance(method, FourierBound) and not method.refine:  # then channels do not depend on each other
        return _each(FourierBound(tolerance=method.tolerance, finalists=None), operator)
    layers = (ConvOperator(geometry, kernel[None]) for kernel in operator.weight)
    return torch.stack([method.compute(layer).value for layer in layers])


def _summary(values: Tensor) -> dict[str, float]:
    low, median, high = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75]).to(values)).tolist()
    return {"low": low, "median": median, "high": high, "least": float(values.min()), "largest": float(values.max())}


def show(result: Result) -> None:
    """A table of the medians."""
    columns = {
        "paper, 30 iterations": "paper to reference",
        "paper": "paper",
        "FourierBound": "FourierBound",
        "auto": "auto",
    }
    table = Table("kernel", "N", *columns, title="overestimation, median")
    for cell in result["cells"].values():
        table.add_row(cell["family"], str(cell["N"]), *(f"{cell[key]['median']:.3%}" for key in columns.values()))
    Console(width=console_width()).print(table)
