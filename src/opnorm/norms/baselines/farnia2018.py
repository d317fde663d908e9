"""`Farnia2018`: power iteration on the whole operator, from the image of the last call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.iteration import operator_power, warm_vector
from opnorm.norms.baselines.kernels import without_size
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Farnia2018(Method):
    """σ = ⟨v, Kx⟩ ≤ ‖K‖ with v = Kx/‖Kx‖, x = Kᵀv/‖Kᵀv‖, `steps` times from the x of the last call.

    Any geometry, as `Ryu2019`. A lower bound; during training one step a call follows the weights. The price is the
    state: an image of the layer's input, C_in·N^d numbers, as `memory` says: for 64 channels of 128³ voxels half a
    gigabyte a layer, where `Runkel2021` stores C_in numbers for pointwise layers and nothing for depthwise ones.

    Args:
        steps: how many applications of KᵀK a call.
        seed: of the random image that the first call starts from.
    """

    steps: int = 1
    seed: int = 0

    guarantee = "lower"
    source = "Farnia, Zhang, Tse: Generalizable Adversarial Training via Spectral Normalization, ICLR 2019 (arXiv 2018)"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected at least one step, got steps={self.steps}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return without_size(geometry)

    def memory(self, geometry: ConvGeometry, dtype: torch.dtype = torch.float32) -> int:
        """Bytes stored between calls: the image x."""
        return math.prod(geometry.shapes[0]) * dtype.itemsize

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        start = warm_vector(state, operator.geometry.shapes[0], weight, self.seed)
        value, x = operator_power(ConvOperator(operator.geometry, weight), start, self.steps)
        return NormBound(scale * value, "lower", self, state=x)
