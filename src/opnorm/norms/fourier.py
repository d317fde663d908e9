"""`FourierBound`: ‖K‖ ≤ min over phases of max over frequencies of the response of the kernel (DESIGN 1.2 to 1.7)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opnorm.bound import Guarantee, Method, NormBound, rounded_up, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.embedding import AxisGrid, axis_grid
from opnorm.norms.exact import group_size
from opnorm.norms.gram import attach_gradient
from opnorm.norms.groups import alias_matrix, dense_groups, group_weights, has_scalar_response
from opnorm.norms.refine import LARGEST, refine
from opnorm.norms.spectrum import matrix_peaks, scalar_peak_angles, scalar_peaks
from opnorm.operator import ConvOperator

COARSE = 0.02  # looseness of the first look at all channels: far fewer than `finalists` lie so close to the largest


@dataclass(frozen=True)
class FourierBound(Method):
    """‖K‖² ≤ min_φ max_j P(ω_j + φ), with P(ω) = |θ̂(ω)|², or ‖θ̂(ω)‖² where θ̂(ω) is a matrix, on twisted circulants.

    Zero padding: every phase φ ∈ {0, ½}^d of the grid M = N + max(a, b) bounds the norm, and so does the least bound.
    Stride: P is averaged over its aliases, on the M/s grid of the output. Circular padding: the grid N, exact where the
    stride divides N. Reflect and replicate padding: times the norm of the padding. Any size, and large ones: G points
    an axis, times Π 1/cos(πn/2G). Dense and grouped: the matrix norms by Gram iteration.

    Args:
        tolerance: how much looser than the embedding, and at any size than the supremum, the bound may get by taking
            such a grid of G points where it is the smaller one.
        finalists: how many of the largest channels are bounded on their full grid, after a bound of all channels on a
            coarse one: `max(full bound of these, coarse bound of the next)` is still an upper bound. None takes all.
        refine: on small inputs, how many of the largest channels are then evaluated exactly, by the same rule.
        workspace: bytes of memory to use at a time.
    """

    tolerance: float = 1e-4
    finalists: int | None = 8
    refine: int = 0
    workspace: int = 2**22

    guarantee = "upper"
    source = "this library; the embedding at N + 2p without phases is Theorem 2 of Runkel, Etmann et al. (2021)"

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"expected a tolerance between 0 and 1, got {self.tolerance}; 1e-4 is the default")
        if self.refine < 0 or (self.finalists is not None and self.finalists < 1):
            raise ValueError(
                f"expected refine of at least 0 and finalists of at least 1 (None for all channels), got "
                f"refine={self.refine} and finalists={self.finalists}"
            )

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return None

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        return self.compute_all([operator])[0]

    def compute_all(self, operators: Sequence[ConvOperator]) -> list[NormBound]:
        """The norms of many layers, of which those that share a grid are stacked on the channel axis."""
        layers = [self._layer(operator) for operator in operators]
        stacks: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, layer in enumerate(layers):
            if layer.scalar:
                stacks[layer.key].append(index)
        bounds: dict[int, Tensor] = {}
        for indices in stacks.values():
            bounds |= zip(indices, self._scalar([layers[i] for i in indices]), strict=True)
        return [self._bound(layer, bounds.get(index)) for index, layer in enumerate(layers)]

    def _layer(self, operator: ConvOperator) -> _Layer:
        grids = self.grids(operator.geometry)
        dtype = torch.promote_types(operator.weight.dtype, torch.float32)
        weights = group_weights(operator.weight.to(dtype), operator.geometry)
        return _Layer(operator, weights, grids, has_scalar_response(weights.shape[1], weights.shape[2], grids))

    def _scalar(self, layers: Sequence[_Layer]) -> list[Tensor]:
        """The bound of each channel of layers with the same grids."""
        kernels, grids = torch.cat([layer.kernels for layer in layers]), layers[0].grids
        sizes = [len(layer.weights) for layer in layers]
        coarse = self.grids(layers[0].operator.geometry, COARSE)
        if self.finalists is None or 2 * _size(coarse) > _size(grids):
            return list(self._channels(kernels, grids).split(sizes))
        starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        bounds = self._channels(kernels, coarse)
        parts = zip(starts, bounds.split(sizes), strict=True)
        top = torch.cat([first + p.topk(min(self.finalists, len(p))).indices for first, p in parts])
        full = self._channels(kernels[top], grids)
        return list(bounds.scatter(0, top, torch.minimum(full, bounds[top])).split(sizes))

    def _channels(self, kernels: Tensor, grids: tuple[AxisGrid, ...]) -> Tensor:
        """√P, rounded up, of kernels (channels, members, taps), each scaled by a power of two."""
        scaled, scale = working_weight(kernels, dim=(1, 2))
        roots = scalar_peaks(scaled, grids, self.workspace).sqrt()
        return rounded_up(scale.flatten().double() * roots.double(), kernels.dtype)  # subnormal ones would round down

    def _bound(self, layer: _Layer, bounds: Tensor | None) -> NormBound:
        operator, angles = layer.operator, None
        if (
            bounds is None
        ):  # a matrix at every frequency: double precision costs little more, and leaves no margin to see
            weights, scale = working_weight(layer.weights.detach(), torch.float64)
            squared, angles = matrix_peaks(weights, layer.grids, self.workspace)
            bounds = rounded_up(scale * squared.sqrt(), layer.weights.dtype)
        embedding = bounds
        if self.refine > 0 and _is_small(operator.geometry):
            bounds = self._refined(layer, bounds)
        value = bounds.amax()
        if operator.weight.requires_grad:
            value = value * self._one_with_gradient(layer, angles, embedding, bounds)
        guarantee: Guarantee = "exact" if layer.scalar and all(g.exact for g in layer.grids) else "upper"
        return NormBound(value, guarantee, self, per_channel=bounds)

    def _refined(self, layer: _Layer, bounds: Tensor) -> Tensor:
        weights, scale = working_weight(layer.weights.detach(), torch.float64)
        better = refine(weights, layer.operator.geometry.axes, bounds.double() / scale, self.refine)
        return rounded_up(scale * better, bounds.dtype)

    def _one_with_gradient(self, layer: _Layer, angles: Tensor | None, embedding: Tensor, bounds: Tensor) -> Tensor:
        """A one with the gradient of log ‖θ̂‖ at the frequency of the bound, or of log ‖K_c‖ where c was refined."""
        index = bounds.argmax()[None]
        top, _ = working_weight(layer.weights.index_select(0, index))
        if angles is None:
            at = scalar_peak_angles(top[0].detach().flatten(2).flatten(0, 1), layer.grids)[None]
        else:
            at = angles.index_select(0, index).to(top.dtype)
        response = attach_gradient(alias_matrix(top[0], layer.grids, at)[0])
        if bounds is embedding:
            return response
        norm = attach_gradient(dense_groups(top, layer.operator.geometry.axes)[0])
        return torch.where(bounds.index_select(0, index)[0] < embedding.index_select(0, index)[0], norm, response)

    def is_exact(self, geometry: ConvGeometry) -> bool:
        """Whether the bound is the norm itself, to rounding: circular padding, or windows that do not overlap."""
        rows, columns = geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1]
        grids = self.grids(geometry)
        return has_scalar_response(rows, columns, grids) and all(g.exact for g in grids)

    def grids(self, geometry: ConvGeometry, tolerance: float | None = None) -> tuple[AxisGrid, ...]:
        """The frequencies that this method looks at, an axis at a time."""
        share = (1 + (tolerance or self.tolerance)) ** (1 / max(geometry.dim, 1)) - 1
        return tuple(axis_grid(axis, share) for axis in geometry.axes)


class _Layer(NamedTuple):
    """An operator with its weight grouped, and its grids."""

    operator: ConvOperator
    weights: Tensor  # (groups, outputs, inputs, *kernel)
    grids: tuple[AxisGrid, ...]
    scalar: bool

    @property
    def kernels(self) -> Tensor:
        """(groups, members, taps)."""
        return self.weights.detach().flatten(3).flatten(1, 2)

    @property
    def key(self) -> tuple[Any, ...]:
        """What layers have to share to be stacked."""
        return self.grids, self.kernels.shape[1], self.weights.dtype, self.weights.device


def _is_small(geometry: ConvGeometry) -> bool:
    return geometry.has_size and not geometry.is_matrix and group_size(geometry) <= LARGEST


def _size(grids: tuple[AxisGrid, ...]) -> int:
    return math.prod(g.points * len(g.phases) for g in grids)
