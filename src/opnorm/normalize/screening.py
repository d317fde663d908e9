"""The largest channel of each depthwise layer, found without looking at every channel closely; for CPUs.

A coarse grid bounds every channel at once, 14 % too high at most. The few largest are then bounded on the layer's own
grid, and after them only those whose first bound still exceeds the best value: on most layers none. The result is the
same as if all channels had been bounded on the own grid, since the first bound is never below that. How many are left
depends on values, which a GPU would have to send to the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from opnorm.bound import rounded_up, roundoff, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.embedding import AxisGrid, axis_grid
from opnorm.norms.spectrum import Tables, coarse_power, coarse_rounding, grid_peaks, phase_angles

Grids = tuple[AxisGrid, ...]
COARSE = 0.068  # an axis
FIRST = 8
WORKSPACE = 2**21  # bytes
BLOCK = 2**19  # bytes, few enough for a cache


@dataclass(frozen=True, eq=False)
class Form:
    """All of a layer but its weight: how many channels and kernels in each, its own grid, and a coarse one."""

    channels: int
    members: int
    own: Grids
    coarse: Grids

    @classmethod
    def of(cls, geometry: ConvGeometry, own: Grids) -> Form:
        """The form of a layer; the coarse grid bounds inputs of any size."""
        members = math.prod(geometry.weight_shape[:2]) // geometry.groups
        coarse = tuple(axis_grid(a._replace(inputs=None, outputs=None), COARSE) for a in geometry.axes)
        return cls(geometry.groups, members, own, coarse)


def largest(forms: Sequence[Form], weights: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each layer, rounded up, in at least float32."""
    found: dict[int, Tensor] = {}
    for numbers, stack in _stacks(tuple(forms)):
        kernels = torch.cat([weights[i].reshape(forms[i].channels, forms[i].members, -1) for i in numbers])
        wide = kernels.to(torch.promote_types(kernels.dtype, torch.float32))
        found |= zip(numbers, stack.norms(wide).unbind(), strict=True)
    return [found[i] for i in range(len(forms))]


@lru_cache(maxsize=64)
def _stacks(forms: tuple[Form, ...]) -> list[tuple[list[int], _Stack]]:
    """Layers that can be looked at together: their numbers, in the order in which they are stacked."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, form in enumerate(forms):
        alike[form.coarse, form.members].append(number)
    orders = [sorted(some, key=lambda i: (hash(forms[i].own), forms[i].channels)) for some in alike.values()]
    return [(order, _Stack([forms[i] for i in order])) for order in orders]


class _Run(NamedTuple):
    """Layers with one grid and one number of channels, next to each other, and the first channel of each."""

    own: Grids
    channels: int
    starts: Tensor  # (layers,)

    def largest(self, upper: Tensor) -> Tensor:
        """The channels of largest bound of each layer, one layer after the other."""
        first, count = int(self.starts[0]), len(self.starts)
        mine = upper[first : first + count * self.channels].view(count, -1)
        return (mine.topk(min(FIRST, self.channels), 1, sorted=False).indices + self.starts[:, None]).flatten()


class _Stack:
    """Layers on the channel axis, run by run."""

    def __init__(self, forms: Sequence[Form]):
        self.coarse = forms[0].coarse
        sizes = torch.tensor([form.channels for form in forms])
        self.layer = torch.arange(len(forms)).repeat_interleave(sizes)  # (channels,), which layer each belongs to
        starts = (sizes.cumsum(0) - sizes).split([len([*s]) for _, s in groupby(forms, _kind)])
        self.runs = [_Run(*kind, s) for (kind, _), s in zip(groupby(forms, _kind), starts, strict=True)]
        self.ends = torch.stack([r.starts[-1] + r.channels for r in self.runs])

    def norms(self, kernels: Tensor) -> Tensor:
        """(layers,), from the kernels (channels, members, taps) of all."""
        scaled, scale = working_weight(kernels, dim=(1, 2))
        upper = scale.flatten() * coarse_bounds(scaled, self.coarse)
        first = [run.largest(upper) for run in self.runs]
        bounds = self._own_bounds(scaled, scale, first)
        best = torch.cat([b.view(len(r.starts), -1).amax(1) for b, r in zip(bounds, self.runs, strict=True)])
        upper[torch.cat(first)] = 0
        left = (upper > best[self.layer]).nonzero().flatten()
        if not len(left):
            return best
        counts = torch.searchsorted(left, self.ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        rest = torch.cat(list(self._own_bounds(scaled, scale, left.split(counts.tolist()))))
        return best.scatter_reduce(0, self.layer[left], rest, "amax")

    def _own_bounds(self, scaled: Tensor, scale: Tensor, chosen: Sequence[Tensor]) -> Sequence[Tensor]:
        """The bounds of the chosen channels of each run, rounded up."""
        index, counts = torch.cat(list(chosen)), [len(c) for c in chosen]
        kernels = scaled[index]
        power = coarse_power(kernels, Tables.of(self.coarse, kernels))
        rounding = coarse_rounding(kernels, power, self.coarse)
        squared = [
            grid_peaks(p, r, run.own, WORKSPACE) if len(p) else r
            for p, r, run in zip(power.split(counts), rounding.split(counts), self.runs, strict=True)
        ]
        roots = torch.cat(squared).sqrt()
        values = scale.flatten()[index].double() * roots.double()
        return rounded_up(values, roots.dtype).split(counts)


def _kind(form: Form) -> tuple[Grids, int]:
    return form.own, form.channels


def coarse_bounds(kernels: Tensor, grids: Grids) -> Tensor:
    """√P at every frequency, rounded up, of all kernels (channels, members, taps): for so few points, straight."""
    waves, aliases, factor = _waves(grids, kernels.dtype)
    count, members, taps = kernels.shape
    step = max(1, BLOCK // (members * len(waves) * kernels.element_size()))
    squared, room = kernels.new_empty(count), kernels.new_empty(len(waves) * members * min(step, count))
    for some, peaks in zip(kernels.split(step), squared.split(step), strict=True):
        values = room[: len(waves) * members * len(some)].view(len(waves), -1)
        real, imag = torch.mm(waves, some.flatten(0, 1).T, out=values).chunk(2)  # (aliases · points, kernels)
        power = real.square_().addcmul_(imag, imag)
        if aliases > 1:
            power = power.view(aliases, -1).sum(0)
        if members > 1:
            power = power.view(-1, members).sum(1)
        torch.amax(power.view(-1, len(some)), 0, out=peaks)
    # The largest value on the grid is at least the mean, ‖θ‖², and rounding is relative to (Σ|θ|)² ≤ taps·‖θ‖².
    margin = 1 + 8 * (taps + members + aliases + 4) * taps**0.5 * roundoff(kernels)
    return (squared * (margin / aliases)).sqrt() * factor


@cache
def _waves(grids: Grids, dtype: torch.dtype) -> tuple[Tensor, int, float]:
    """(aliases · points, taps), cosines then sines, how many aliases each has, and the factor of the grids."""
    angles = phase_angles(grids)[0]  # (points, dim), of one phase
    steps = torch.tensor([g.step for g in grids], dtype=torch.float64)
    shifts = _product([torch.arange(g.step, dtype=torch.float64) for g in grids])
    taps = _product([torch.arange(g.kernel, dtype=torch.float64) for g in grids])
    turns = ((angles + 2 * math.pi * shifts[:, None]) / steps).flatten(0, 1) @ taps.T
    return torch.cat([turns.cos(), turns.sin()]).to(dtype), len(shifts), math.prod(g.factor for g in grids) * (1 + 1e-6)


def _product(axes: Sequence[Tensor]) -> Tensor:
    return torch.cartesian_prod(*axes).view(-1, len(axes))
