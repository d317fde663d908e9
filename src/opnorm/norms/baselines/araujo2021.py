"""`Araujo2021`: LipGrid, the largest values of trigonometric polynomials on a fixed grid of frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from opnorm.bound import Guarantee, Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.kernels import (
    grid_factor,
    outside_plane,
    positive_root,
    response,
    response_roundings,
    rounded_upward,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Araujo2021(Method):
    """‖K‖² ≤ Σ_i sup_ω Σ_j |F_ij(ω)|², i over the fewer of output and input channels, j over the others (LipBound).

    The operator is a matrix of doubly-block Toeplitz matrices, one for each pair of channels, of norm sup |F_ij|. For
    one channel a group (depthwise) the bound is sup |F|; for a dense layer it is a Frobenius norm, up to √C too large.

    LipGrid takes the supremum on S equispaced frequencies an axis, which falls short of it. `corrected` multiplies by
    Π (1 - (k-1)/S)^{-1/2}, after Pfister, Bresler (2018), with which it is a bound: 4 % for 3×3 and S = 50. Without it
    the value has no guarantee, and is what the authors' code returns (which places the S points on [0, 2π] with both
    ends, so that one is lost).

    It bounds every input size, zero padding, circular padding and (by the unit-stride value) stride; dilation changes
    nothing. Groups: the largest of the groups' bounds. Transposed: of the convolution whose adjoint it is. Published in
    2D; the proof is the same in any dimension.

    Args:
        samples: S, at least the kernel size.
        corrected: whether to multiply by the factor.
    """

    samples: int = 50
    corrected: bool = True

    guarantee = "none"  # upper if corrected
    source = "Araujo, Negrevergne, Chevaleyre, Atif: On Lipschitz Regularization of Convolutional Layers using Toeplitz Matrix Theory, AAAI 2021"  # fmt: skip  # noqa: E501

    def why_not(self, geometry: ConvGeometry) -> str | None:
        if any(k > self.samples for k in geometry.kernel_size):
            return f"expected samples of at least the kernel size {geometry.kernel_size}, got {self.samples}"
        return outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        kernel = operator.geometry.kernel_size
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, operator.geometry)
        sizes = [self.samples] * len(kernel)
        squares = response(kernels, sizes, [1] * len(kernel)).abs().square()  # (groups, rows, columns, frequencies)
        over = 2 if kernels.shape[1] <= kernels.shape[2] else 1
        norms = positive_root(squares.sum(over).amax(-1).sum(-1))
        if self.corrected:
            norms = math.prod(grid_factor(k, self.samples) for k in kernel) * norms
        each = scale * rounded_upward(norms, response_roundings(kernels, sizes) + sum(kernels.shape[1:3]))
        guarantee: Guarantee = "upper" if self.corrected else "none"
        return NormBound(each.amax(), guarantee, self, per_channel=each)
