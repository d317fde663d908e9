"""Random geometries: `case(i)` is a pure function of i, small enough that the dense SVD of its operator is the truth.

A failing test names the index. `OPNORM_CASES=17,905 pytest tests/test_laws.py` runs those cases alone, and
`OPNORM_SEED=3` draws other geometries.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator
from samplers import SAMPLERS

SEED = os.environ.get("OPNORM_SEED", "0")
COUNT = 2400  # geometries in the default suite
LIMIT = 300  # most rows and columns of the dense operator

PRIMES = {1: (2, 3, 5, 7, 11, 13, 17, 23, 31), 2: (2, 3, 5, 7, 11, 13), 3: (2, 3, 5, 7)}
KERNELS = {1: (1, 2, 3, 3, 3, 4, 5, 7), 2: (1, 2, 3, 3, 3, 4, 5, 7), 3: (1, 2, 2, 3, 3, 4)}
STYLES = ("valid", *["torch"] * 2, "per dimension", *["per side"] * 2, "wide", "same", "tensorflow", *["mode"] * 4)
Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A geometry and how to draw its weight."""

    index: int
    geometry: ConvGeometry
    sampler: str

    def operator(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> ConvOperator:
        """The operator of this case, the same object at every call, so that its truth is computed once."""
        return _operator(self, dtype, str(device))

    def __str__(self) -> str:
        again = f"OPNORM_CASES={self.index} OPNORM_SEED={SEED}"
        return f"case({self.index}) [{again}]: {self.geometry!r}, {self.sampler} weight"


@cache
def case(index: int) -> Case:
    """Case number `index`. Families and dimensions take turns, everything else is drawn."""
    rng = random.Random(f"{SEED}-{index}")
    family = FAMILIES[index % len(FAMILIES)]
    dim = 1 + index // len(FAMILIES) % 3
    return Case(index, _draw(rng, family, dim), rng.choice(tuple(SAMPLERS)))


def indices(count: int = COUNT) -> list[int]:
    """0..count-1, or the cases asked for by OPNORM_CASES."""
    chosen = os.environ.get("OPNORM_CASES")
    return [int(i) for i in chosen.split(",")] if chosen else list(range(count))


def batches(count: int = COUNT, size: int = 400) -> list[list[int]]:
    """The indices in batches: a test for each of thousands of cases would spend its time in pytest."""
    every = indices(count)
    return [every[i : i + size] for i in range(0, len(every), size)]


def supported(why_not: Callable[[ConvGeometry], str | None], count: int, skip: int = 0) -> Iterator[Case]:
    """The first `count` cases that a method supports, spread over all of them."""
    found = 0
    for index in indices():
        candidate = case((index * 997 + skip) % COUNT if "OPNORM_CASES" not in os.environ else index)
        if found < count and why_not(candidate.geometry) is None:
            found += 1
            yield candidate


def random_fields(rng: random.Random, family: str, dim: int) -> Fields:
    """Arguments of a ConvGeometry, drawn freely; torch, and so ConvGeometry, may refuse them."""
    if family == "linear":
        channels = {"in_channels": rng.randint(1, 40), "out_channels": rng.randint(1, 40)}
        return {**channels, "kernel_size": (), "input_size": ()}
    transposed = family.startswith("transposed ")
    channels = _channels(rng, family.removeprefix("transposed "))
    kernel = (1,) * dim if "pointwise" in family else tuple(rng.choice(KERNELS[dim]) for _ in range(dim))
    fields: Fields = {
        **channels,
        "kernel_size": kernel,
        "stride": tuple(rng.choice((1, 1, 1, 2, 2, 3, 4)) for _ in range(dim)),
        "dilation": tuple(rng.choice((1, 1, 1, 1, 2, 3)) for _ in range(dim)),
        "transposed": transposed,
    }
    if rng.random() < 0.4:
        fields["stride"] = (1,) * dim
    fields["input_size"] = _sizes(rng, dim, fields["stride"])
    if transposed and rng.random() < 0.5:
        fields["output_padding"] = tuple(
            rng.randrange(max(s, d)) for s, d in zip(fields["stride"], fields["dilation"], strict=True)
        )
    return fields | _padding(rng, fields)


def _draw(rng: random.Random, family: str, dim: int) -> ConvGeometry:
    while True:
        try:
            geometry = ConvGeometry(**random_fields(rng, family, dim))
        except ValueError:
            continue  # what is refused, and that torch refuses it too, is the business of test_geometry
        if max(dense_shape(geometry)) <= LIMIT:
            return geometry


def dense_shape(geometry: ConvGeometry) -> tuple[int, int]:
    """Rows and columns of the operator."""
    return (
        geometry.out_channels * math.prod(n or 0 for n in geometry.output_size),
        geometry.in_channels * math.prod(n or 0 for n in geometry.input_size),
    )


def _channels(rng: random.Random, kind: str) -> dict[str, int]:
    groups, few = rng.randint(1, 4), rng.randint(1, 3)
    if kind == "depthwise":
        return {"in_channels": groups, "out_channels": groups, "groups": groups}
    if kind == "multiplier":  # several outputs for each input
        return {"in_channels": groups, "out_channels": groups * (1 + few), "groups": groups}
    if kind == "single output":  # several inputs a group, one output
        return {"in_channels": groups * (1 + few), "out_channels": groups, "groups": groups}
    if kind == "grouped":
        return {"in_channels": 2 * rng.choice((2, 3)), "out_channels": 2 * rng.choice((2, 3)), "groups": 2}
    return {"in_channels": rng.randint(1, 5), "out_channels": rng.randint(1, 5), "groups": 1}


def _sizes(rng: random.Random, dim: int, stride: tuple[int, ...]) -> tuple[int, ...]:
    if dim < 3 and rng.random() < 0.25:  # even sizes, and circles that the stride divides
        return tuple(s * rng.randint(1, 4) for s in stride)
    return tuple(rng.sample(PRIMES[dim], dim))


def _padding(rng: random.Random, fields: Fields) -> Fields:
    kernel, dilation, stride, size = (fields[k] for k in ("kernel_size", "dilation", "stride", "input_size"))
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    style = rng.choice(STYLES)
    if style == "mode" and not fields["transposed"]:
        sides = [(rng.randint(0, min(e, n)), rng.randint(0, min(e, n))) for e, n in zip(extents, size, strict=True)]
        return {"padding": sides, "padding_mode": rng.choice(("circular", "reflect", "replicate"))}
    if style == "same" and not fields["transposed"]:
        return {"padding": "same", "stride": 1}
    if style == "tensorflow":
        return {"padding": [_one_sided(n, e, s) for n, e, s in zip(size, extents, stride, strict=True)]}
    if style == "wide":  # more than the kernel reaches, so that some outputs see padding alone
        return {"padding": [(e + rng.randint(-1, 2), rng.randint(0, e + 2)) for e in extents]}
    if style == "per side":
        return {"padding": [(rng.randint(0, max(e - 1, 1)), rng.randint(0, max(e - 1, 1))) for e in extents]}
    if style == "per dimension":
        return {"padding": [rng.randint(0, e - 1) for e in extents]}
    if style == "torch":
        return {"padding": max(kernel) // 2}
    return {"padding": 0 if fields["transposed"] else "valid"}


def _one_sided(size: int, extent: int, stride: int) -> tuple[int, int]:
    """TensorFlow's SAME: ⌈N/s⌉ outputs, and the odd element of padding goes after."""
    total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
    return total // 2, total - total // 2


@cache
def _operator(chosen: Case, dtype: torch.dtype, device: str) -> ConvOperator:
    generator = torch.Generator().manual_seed(chosen.index)
    weight = SAMPLERS[chosen.sampler](chosen.geometry, generator)
    return ConvOperator(chosen.geometry, weight.to(dtype).to(device))


KINDS = ("depthwise", "multiplier", "single output", "grouped", "dense", "pointwise")
FAMILIES = (*KINDS, "depthwise", "dense", *(f"transposed {kind}" for kind in KINDS), "linear", "depthwise")
