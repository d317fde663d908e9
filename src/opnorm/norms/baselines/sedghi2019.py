"""`Sedghi2019`: all singular values of a circular convolution, and the largest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opnorm.bound import Guarantee, Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.kernels import (
    is_circulant,
    is_whole_circulant,
    outside_plane,
    response,
    response_roundings,
    rounded_upward,
    singular_roundings,
    spectral_norms,
    without_size,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Sedghi2019(Method):
    """max_j ‖F(2πj/N)‖₂ over the grid N: F(ω) = Σ_n W[n] e^{-i⟨n,ω⟩}, a C_out × C_in matrix, by its singular values.

    Exact for circular padding at stride 1 (Theorem 6; proved in 2D, and the same in any dimension). With a stride, or
    less padding than e-1, an upper bound: rows are left out. With zero padding it is an approximation that may lie on
    either side: the zero-padded operator is no part of the circulant of size N, and F may peak between the grid points.
    Groups: the largest of the groups' norms. Transposed: of the convolution whose adjoint it is.
    Memory and time: a complex C_out × C_in matrix, and its singular values, at each of N^d / 2 frequencies.
    """

    guarantee = "none"
    source = "Sedghi, Gupta, Long: The Singular Values of Convolutional Layers, ICLR 2019"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return without_size(geometry) or outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        geometry = operator.geometry
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, geometry)
        sizes = [axis.size[0] for axis in geometry.axes]
        matrices = response(kernels, sizes, geometry.dilation).movedim(-1, 1)  # (groups, frequencies, rows, columns)
        norms = spectral_norms(matrices).amax(1)
        roundings = response_roundings(kernels, sizes) + singular_roundings(matrices)
        each = scale * rounded_upward(norms, roundings)
        return NormBound(each.amax(), guarantee_on_circle(geometry), self, per_channel=each)


def guarantee_on_circle(geometry: ConvGeometry) -> Guarantee:
    """What the norms at the frequencies of the grid N are."""
    if is_whole_circulant(geometry):
        return "exact"
    return "upper" if is_circulant(geometry) else "none"
