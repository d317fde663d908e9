"""`Tsuzuku2018`: the norm of the reshaped kernel, times the root of how many windows an input lies in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.baselines.kernels import outside_plane, rounded_upward, singular_roundings, spectral_norms
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Tsuzuku2018(Method):
    """‖K‖ ≤ √m ‖W‖₂, W the kernel reshaped to C_out × (C_in Πk), m = Π⌈k/s⌉ the most windows that an input lies in.

    ‖Kx‖² is the sum of ‖W·patch‖² over the windows, and every input appears in at most m of the patches. The stride
    lowers m, as published. With dilation δ, m = Π⌈k gcd(s, δ)/s⌉, since the taps of one residue modulo s alone meet an
    input; m is at most the number of outputs. Where a stride does not divide a circle, m counts all k taps.
    Groups: the largest of the groups' bounds. Transposed: of the convolution whose adjoint it is. Any dimension.

    The paper obtains ‖W‖₂ by power iteration, which approaches it from below; here it is computed by singular values,
    so that the bound is one.
    """

    guarantee = "upper"
    source = "Tsuzuku, Sato, Sugiyama: Lipschitz-Margin Training, NeurIPS 2018"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        matrices = group_weights(weight, operator.geometry).flatten(2)
        windows = math.prod(_windows(axis) for axis in operator.geometry.axes)
        norms = math.sqrt(windows) * spectral_norms(matrices)
        each = scale * rounded_upward(norms, singular_roundings(matrices) + 2)
        return NormBound(each.amax(), "upper", self, per_channel=each)


def _windows(axis: Axis) -> int:
    """The most (output, tap) pairs that read one input."""
    met = -(-axis.kernel * math.gcd(axis.stride, axis.dilation) // axis.stride)
    if axis.mode == "circular":
        return met if axis.inputs is not None and axis.inputs % axis.stride == 0 else axis.kernel
    return met if axis.outputs is None else min(met, axis.outputs)
