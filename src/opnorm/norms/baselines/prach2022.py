"""`Prach2022`: AOL, sums of absolute autocorrelation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.delattre2023 import gram_products
from opnorm.norms.baselines.kernels import (
    gram_kernel,
    outside_plane,
    power_of_two_root,
    response_roundings,
    rounded_upward,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Prach2022(Method):
    """‖K‖ ≤ max_j √t_j, t_j = Σ_{i,l} |Σ_o (W_oi ⋆ W_oj)[l]|: the rows of KᵀK, whose absolute sums bound its norm.

    i and j are input channels, o output channels, l the lags of the correlation ⋆. For a matrix, t_j = Σ_i |WᵀW|_ij.

    AOL itself goes further than a bound: it rescales input channel j by t_j^{-1/2}, after which ‖K diag(t^{-1/2})‖ ≤ 1
    with less lost than by dividing everything by one number, and nothing for orthogonal kernels. `rescaled` does so.

    It bounds every input size, zero padding, circular padding and (by the unit-stride value) stride; dilation changes
    nothing. Groups: the largest of the groups' bounds. Transposed: of the adjoint. Any dimension.
    """

    guarantee = "upper"
    source = "Prach, Lampert: Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks, ECCV 2022"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        roots, scale = self._roots(operator)
        each = scale * roots.amax(1)
        return NormBound(each.amax(), "upper", self, per_channel=each)

    def rescaled(self, operator: ConvOperator) -> ConvOperator:
        """The layer that AOL puts in place of this one, of norm at most 1: channel j divided by √t_j."""
        if (reason := self.why_not(operator.geometry)) is not None:
            raise ValueError(reason)
        roots, scale = self._roots(operator)
        kernels = group_weights(operator.weight.to(roots.dtype), operator.geometry)
        divisor = scale * torch.where(roots > 0, roots, 1.0)  # a channel of zeros stays one
        divisor = divisor.reshape(len(roots), 1, -1, *[1] * (kernels.dim() - 3))
        return ConvOperator(operator.geometry, (kernels / divisor).reshape(operator.weight.shape))

    def _roots(self, operator: ConvOperator) -> tuple[Tensor, Tensor]:
        """√t_j, (groups, columns), of the scaled weight, and the scale."""
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, operator.geometry)
        gram, log_scale = gram_kernel(kernels, 1)
        sums = gram.abs().flatten(3).sum(-1).sum(1)
        roots = power_of_two_root(sums, log_scale[:, None], 1)
        roundings = response_roundings(kernels, [2 * k - 1 for k in kernels.shape[3:]]) + 8
        return rounded_upward(roots, roundings, products=gram_products(kernels.shape)), scale
