"""The largest channel of each depthwise layer, found without looking at every channel closely; for CPUs.

A grid of 9 points an axis (3 taps) bounds every channel at once, 14 % too high at most. The few largest are then
bounded on the layer's own grid, and after them only those whose first bound still exceeds the best value: on most
layers none. The result is the same as if all channels had been bounded on the own grid, since the first bound is never
below that. How many are left depends on values, which a GPU would have to send to the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from opnorm.bound import rounded_up, roundoff, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.embedding import AxisGrid, axis_grid
from opnorm.norms.groups import group_weights
from opnorm.norms.spectrum import phase_angles, scalar_peaks

Grids = tuple[AxisGrid, ...]
COARSE = 0.068  # an axis
FIRST = 8
WORKSPACE = 2**21


@dataclass(frozen=True, eq=False)
class Layer:
    """The kernels (channels, members, taps) of a layer, the grids on which they are bounded, and on which all are."""

    kernels: Tensor
    own: Grids
    coarse: Grids

    @classmethod
    def of(cls, weight: Tensor, geometry: ConvGeometry, own: Grids, coarse: Grids) -> Layer:
        """In at least float32."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return cls(group_weights(wide, geometry).flatten(3).flatten(1, 2), own, coarse)


def coarse_grids(geometry: ConvGeometry) -> Grids:
    """The grids that bound a layer on inputs of any size."""
    return tuple(axis_grid(a._replace(inputs=None, outputs=None), COARSE) for a in geometry.axes)


def largest(layers: Sequence[Layer]) -> list[Tensor]:
    """The norm of each layer, rounded up."""
    stacks: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        stacks[layer.coarse, layer.kernels.shape[1], layer.kernels.dtype].append(i)
    found: dict[int, Tensor] = {}
    for indices in stacks.values():
        ordered = sorted(indices, key=lambda i: hash(layers[i].own))  # those with one grid lie together
        found |= zip(ordered, _largest([layers[i] for i in ordered]).unbind(), strict=True)
    return [found[i] for i in range(len(layers))]


def _largest(layers: list[Layer]) -> Tensor:
    stack = _Stack(layers)
    upper = stack.coarse_bounds(layers[0].coarse)
    parts = zip(stack.starts, upper.split(stack.sizes), strict=True)
    first = [start + p.topk(min(FIRST, len(p)), sorted=False).indices for start, p in parts]
    best = torch.stack([values.amax() for values in stack.own_bounds(first)])
    upper[torch.cat(first)] = 0
    lengths = torch.tensor(stack.sizes)
    left = (upper > best.repeat_interleave(lengths)).nonzero().flatten()
    if not len(left):
        return best
    ends = torch.tensor(stack.starts) + lengths
    counts = torch.searchsorted(left, ends).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    rest = stack.own_bounds(left.split(counts))
    return torch.stack([torch.cat([b[None], r]).amax() for b, r in zip(best, rest, strict=True)])


@cache
def _waves(grids: Grids, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """(taps, cosines then sines) at the points of one-phase grids, and the factor that bounds all frequencies."""
    angles = phase_angles(grids)[0]  # (points, dim)
    taps = torch.cartesian_prod(*(torch.arange(g.kernel, dtype=torch.float64) for g in grids)).view(-1, len(grids))
    turns = taps @ angles.T
    return torch.cat([turns.cos(), turns.sin()], 1).to(device, dtype), math.prod(g.factor for g in grids) * (1 + 1e-6)


class _Stack:
    """Layers on the channel axis; those with the same own grid lie together."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self.sizes = [len(layer.kernels) for layer in layers]
        self.starts = [sum(self.sizes[:i]) for i in range(len(layers))]
        self.kernels, scale = working_weight(torch.cat([layer.kernels for layer in layers]), dim=(1, 2))
        self.scale = scale.flatten()

    def bounds(self, index: Tensor | slice, grids: Grids) -> Tensor:
        """√P of some channels, rounded up."""
        roots = scalar_peaks(self.kernels[index], grids, WORKSPACE).sqrt()
        return rounded_up(self.scale[index].double() * roots.double(), roots.dtype)

    def coarse_bounds(self, grids: Grids) -> Tensor:
        """√P of all channels, rounded up; so few points are reached faster straight from the taps than by `bounds`."""
        if any(g.step > 1 for g in grids):
            return self.bounds(slice(None), grids)
        waves, margin = _waves(grids, self.kernels.dtype, self.kernels.device)
        taps = self.kernels.shape[2]
        blocks = []
        for kernels in self.kernels.split(max(1, WORKSPACE // waves[0].nbytes)):
            values = (kernels.flatten(0, 1) @ waves).view(*kernels.shape[:2], 2, -1)
            blocks.append(values.square_().sum((1, 2)).amax(1))
        squared = torch.cat(blocks) * (1 + 8 * (taps + self.kernels.shape[1] + 4) * taps**0.5 * roundoff(self.kernels))
        return self.scale * squared.sqrt() * margin

    def own_bounds(self, chosen: Iterable[Tensor]) -> list[Tensor]:
        """The bounds of the chosen channels of each layer, on the layer's own grid, one call a grid."""
        by_grid: dict[Grids, list[Tensor]] = {}
        for layer, some in zip(self.layers, chosen, strict=True):
            by_grid.setdefault(layer.own, []).append(some)
        found: list[Tensor] = []
        for grids, indices in by_grid.items():
            index = torch.cat(indices)
            values = self.bounds(index, grids) if len(index) else self.scale.new_zeros(0)
            found += values.split([len(s) for s in indices])
        return found
