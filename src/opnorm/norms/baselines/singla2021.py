"""`Singla2021`: the fantastic four, four norms of reshaped kernels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.kernels import outside_plane, rounded_upward, singular_roundings, spectral_norms
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Singla2021(Method):
    """‖K‖ ≤ √(k_h k_w) min(‖R‖, ‖S‖, ‖T‖, ‖U‖), the kernel as a matrix in four ways.

    R: (C_out k_h) × (C_in k_w), S: (C_out k_w) × (C_in k_h), T: C_out × (C_in k_h k_w), U: (C_out k_h k_w) × C_in. In d
    dimensions, 2^d of them: each spatial axis goes either with the rows or with the columns. Proof in any dimension:
    uᴴF(ω)v is the form of such a matrix at (u ⊗ waves) and (v ⊗ waves), and a wave of k entries has length √k.
    It bounds sup_ω ‖F(ω)‖, and with it every input size, zero padding, circular padding and (by the unit-stride value)
    stride. Dilation changes nothing. Groups: the largest of the groups' bounds. Transposed: of the adjoint.

    The paper obtains the four by power iteration, which approaches them from below; here they are singular values.
    """

    guarantee = "upper"
    source = "Singla, Feizi: Fantastic Four: Differentiable Bounds on Singular Values of Convolution Layers, ICLR 2021"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, operator.geometry)
        shapes = unfoldings(kernels)
        norms = torch.stack([spectral_norms(matrices) for matrices in shapes]).amin(0)
        norms = math.sqrt(math.prod(operator.geometry.kernel_size)) * norms
        each = scale * rounded_upward(norms, max(map(singular_roundings, shapes)) + 2)
        return NormBound(each.amax(), "upper", self, per_channel=each)


def unfoldings(kernels: Tensor) -> list[Tensor]:
    """Kernels (groups, rows, columns, *kernel) as matrices, with every choice of axes beside the rows."""
    spatial = range(3, kernels.dim())
    result = []
    for choice in itertools.product((True, False), repeat=len(spatial)):
        left = [1, *(axis for axis, chosen in zip(spatial, choice, strict=True) if chosen)]
        right = [2, *(axis for axis, chosen in zip(spatial, choice, strict=True) if not chosen)]
        result.append(kernels.permute(0, *left, *right).flatten(len(left) + 1).flatten(1, len(left)))
    return result
