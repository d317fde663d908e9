"""`Runkel2021`: the method of the paper that this library starts from, as published: the baseline of every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Guarantee, Method, NormBound, working_weight
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.baselines.iteration import normalised, warm_vector
from opnorm.norms.baselines.kernels import (
    is_whole_circulant,
    outside_plane,
    positive_root,
    response,
    response_roundings,
    rounded_upward,
    without_size,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Runkel2021(Method):
    """Depthwise: ‖K‖ ≤ max_{channel, j} |DFT(pad θ)_j| on the grid N + 2p. Pointwise and linear: power method on Θ.

    Depthwise (Theorem 2), an upper bound, stated for odd kernels of 2p+1 taps with p zeros on each side. The proof
    needs no more than that what an output reads beyond the N inputs falls on zeros of the grid, and that outputs do not
    coincide on it: both hold for every zero padding (beyond the extent e, outputs read zeros alone) on a grid of
    N + e - 1, which is N + 2p there. So even kernels, dilation, other paddings and several outputs per channel are
    covered as well, on that grid. Strided layers keep the unit-stride bound: they are some of its rows. Circular
    padding (Theorem 1): the grid N, exact at stride 1.

    Pointwise and linear, a lower bound: u ← ΘᵀΘu/‖ΘᵀΘu‖ from the u of the last call, until ‖ΘᵀΘu - σ²u‖ < ε with
    σ² = ‖ΘᵀΘu‖; the value is σ, the state u, C_in numbers. The paper does not say how long v is in its criterion
    ‖AᵀAv - σ²v‖ < ε; here it is a unit vector, so that σ² is within ε of an eigenvalue. ε is absolute: it suits layers
    of norm near 1, which normalised ones are; a layer of norm below √ε = 0.1 passes after the first step.

    Args:
        eps: when the power method stops.
        max_iter: when it gives up; in float32 ε cannot be reached for layers of norm far above 100.
        seed: of the vector that the power method starts from when there is no state.
    """

    eps: float = 0.01
    max_iter: int = 1000
    seed: int = 0

    guarantee = "none"  # upper for depthwise, lower for pointwise: the bound itself says which
    source = "Runkel, Etmann, Möller, Schönlieb: Depthwise Separable Convolutions Allow for Fast and Memory-Efficient Spectral Normalization, 2021"  # fmt: skip  # noqa: E501

    def __post_init__(self) -> None:
        if self.eps <= 0 or self.max_iter < 1:
            raise ValueError(f"expected eps > 0 and max_iter of at least 1, got {self.eps} and {self.max_iter}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        if geometry.is_matrix:
            return None
        if geometry.kind != "depthwise":
            return f"Runkel2021 takes depthwise, pointwise and linear layers, got {geometry}; use FourierBound for it"
        return without_size(geometry) or outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        if operator.geometry.is_matrix:
            return self._pointwise(operator, state)
        return self._depthwise(operator)

    def _depthwise(self, operator: ConvOperator) -> NormBound:
        geometry = operator.geometry
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, geometry)
        sizes = [_grid(axis) for axis in geometry.axes]
        spectrum = response(kernels, sizes, geometry.dilation).flatten(1, 2)  # (channels, outputs each, frequencies)
        if spectrum.shape[1] == 1:
            largest = spectrum.abs().amax((1, 2))
        else:
            largest = torch.linalg.vector_norm(spectrum, dim=1).amax(1)
        each = scale * rounded_upward(largest, response_roundings(kernels, sizes))
        guarantee: Guarantee = "exact" if is_whole_circulant(geometry) else "upper"
        return NormBound(each.amax(), guarantee, self, per_channel=each)

    def _pointwise(self, operator: ConvOperator, state: Any) -> NormBound:
        weight, scale = working_weight(operator.weight)
        matrix = weight.flatten(1)
        u = warm_vector(state, (matrix.shape[1],), matrix, self.seed)
        u, image = self._iterate(matrix.detach(), u, self.eps / float(scale) / float(scale))
        if matrix.requires_grad:
            image = _squared(matrix, u)
        sigma = positive_root(torch.linalg.vector_norm(image))
        return NormBound(scale * sigma, "lower", self, state=normalised(image.detach(), otherwise=u))

    def _iterate(self, matrix: Tensor, u: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """A unit vector u that passes the test, and ΘᵀΘu."""
        for _ in range(self.max_iter):
            image = _squared(matrix, u)
            if torch.linalg.vector_norm(image - torch.linalg.vector_norm(image) * u) < eps:
                break
            last, u = u, normalised(image, otherwise=u)
        else:
            u = last
        return u, image


def _squared(matrix: Tensor, u: Tensor) -> Tensor:
    return matrix.T @ (matrix @ u)


def _grid(axis: Axis) -> int:
    return axis.size[0] if axis.mode == "circular" else axis.size[0] + axis.extent - 1
