"""`Delattre2023`: Gram iteration at each frequency of a circular convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opnorm.bound import Guarantee, Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.kernels import (
    gram_norms,
    is_circulant,
    outside_plane,
    response,
    response_roundings,
    rounded_upward,
    without_size,
)
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Delattre2023(Method):
    """max_j ‖F_t(2πj/N)‖_F^{1/2^t} over the grid N, with F_0 = F and F_{t+1} = F_tᴴF_t: ‖F‖₂ from above.

    After t steps at most r^{1/2^{t+1}} times ‖F‖₂, r = min(C_out, C_in). An upper bound for circular padding (and, by
    the unit-stride value, with a stride). With zero padding it has no guarantee: the zero-padded operator is no part of
    the circulant of size N, whose norm may be below its own; `Delattre2024` is the correction.
    Groups: the largest of the groups' bounds. Transposed: of the convolution whose adjoint it is. Any dimension.

    Args:
        steps: t.
    """

    steps: int = 6

    guarantee = "none"  # upper for circular padding
    source = "Delattre, Barthélemy, Araujo, Allauzen: Efficient Bound of Lipschitz Constant for Convolutional Layers by Gram Iteration, ICML 2023"  # fmt: skip  # noqa: E501

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected at least one step, got steps={self.steps}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return without_size(geometry) or outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        geometry = operator.geometry
        weight, scale = working_weight(operator.weight)
        kernels = group_weights(weight, geometry)
        sizes = [axis.size[0] for axis in geometry.axes]
        norms = gram_norms(response(kernels, sizes, geometry.dilation).movedim(-1, 1), self.steps).amax(1)
        roundings = response_roundings(kernels, sizes) + 8 * self.steps
        each = scale * rounded_upward(norms, roundings, products=gram_products(kernels.shape))
        guarantee: Guarantee = "upper" if is_circulant(geometry) else "none"
        return NormBound(each.amax(), guarantee, self, per_channel=each)


def gram_products(shape: tuple[int, ...]) -> float:
    """Roundings inside the products AᴴA: n an entry, relative to ‖A‖_F² ≤ √r ‖AᴴA‖_F, halved by each later root."""
    rows, columns = max(shape[1:3]), min(shape[1:3])
    return 2.0 * (rows + 2) * columns**0.5
