"""`Delattre2024`: Gram iteration for zero padding, on the kernel itself or on the grid N with a factor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.baselines.delattre2023 import gram_products
from opnorm.norms.baselines.kernels import (
    gram_kernel,
    gram_norms,
    grid_factor,
    outside_plane,
    power_of_two_root,
    response,
    response_roundings,
    rounded_upward,
    without_size,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Delattre2024(Method):
    """‖K‖ ≤ (max_j Σ_{i,l} |G_ij[l]|)^{1/2^t}, G the kernel of (KᵀK)^{2^(t-1)} on the plane: W convolved with itself.

    G is found by t Gram steps on the kernel with full padding, after which it has 2^t(k-1)+1 lags an axis. The sum is
    the ∞-norm of a self-adjoint operator, which is at least its 2-norm; one step is `Prach2022`. The excess over
    sup_ω ‖F(ω)‖ is at most a factor (C Π(2^t(k-1)+1))^{1/2^{t+1}}, so that it halves about with every step.

    `bridge`: instead, ‖K‖ ≤ Π(1-α)^{-1/2} · max over the grid N of ‖F‖, α = 2⌊k/2⌋/N an axis, with the circular bound
    of `Delattre2023`, the paper's other theorem. Loose where N is close to k, undefined for N ≤ 2⌊k/2⌋. With dilation
    the kernel counts as one of e = δ(k-1)+1 taps. Circular axes need no factor.

    Without `bridge` the bound holds for every input size, zero padding, circular padding and (by the unit-stride value)
    stride; dilation changes nothing. Groups: the largest of the groups' bounds. Transposed: of the adjoint. Any
    dimension, but G of a 3×3×3 kernel with t = 4 has 33³ entries for each pair of channels.

    Args:
        steps: t.
        bridge: whether to go through circular padding.
    """

    steps: int = 4
    bridge: bool = False

    guarantee = "upper"
    source = "Delattre, Barthélemy, Allauzen: Spectral Norm of Convolutional Layers with Circular and Zero Paddings"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected at least one step, got steps={self.steps}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        if not self.bridge:
            return outside_plane(geometry)
        if (reason := without_size(geometry) or outside_plane(geometry)) is not None:
            return reason
        for axis in geometry.axes:
            if axis.mode == "zeros" and axis.size[0] <= _reach(axis):
                return (
                    f"expected an input of more than {_reach(axis)} for a kernel extent of {axis.extent}, got "
                    f"{axis.inputs}; use Delattre2024() without bridge"
                )
        return None

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, operator.geometry)
        each = scale * (self._through_circle(kernels, operator.geometry) if self.bridge else self._on_kernel(kernels))
        return NormBound(each.amax(), "upper", self, per_channel=each)

    def _on_kernel(self, kernels: Tensor) -> Tensor:
        if kernels.shape[2] > kernels.shape[1]:  # KKᵀ is smaller, and has the same norm
            kernels = kernels.transpose(1, 2)
        gram, log_scale = gram_kernel(kernels, self.steps)
        sums = gram.abs().flatten(3).sum(-1).sum(1).amax(-1)
        lags = [2**self.steps * (k - 1) + 1 for k in kernels.shape[3:]]
        roundings = response_roundings(kernels, lags) + 8 * self.steps
        value = power_of_two_root(sums, log_scale, self.steps)
        return rounded_upward(value, roundings, products=gram_products(kernels.shape))

    def _through_circle(self, kernels: Tensor, geometry: ConvGeometry) -> Tensor:
        sizes = [axis.size[0] for axis in geometry.axes]
        norms = gram_norms(response(kernels, sizes, geometry.dilation).movedim(-1, 1), self.steps).amax(1)
        factor = math.prod(
            grid_factor(_reach(axis) + 1, axis.size[0]) for axis in geometry.axes if axis.mode == "zeros"
        )
        roundings = response_roundings(kernels, sizes) + 8 * self.steps
        return factor * rounded_upward(norms, roundings, products=gram_products(kernels.shape))


def _reach(axis: Axis) -> int:
    """2⌊e/2⌋, as published: e-1 for the odd kernels that it is meant for, and one more than needed for even ones."""
    return 2 * (axis.extent // 2)
