"""`Ryu2019`: power iteration on the whole operator, from a random image at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.iteration import operator_power, start_vector
from opnorm.norms.baselines.kernels import without_size
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Ryu2019(Method):
    """σ = ⟨v, Kx⟩ ≤ ‖K‖ with v = Kx/‖Kx‖, x = Kᵀv/‖Kᵀv‖, `steps` times from a random image x.

    Any geometry: padding, stride, groups and transposition are whatever the layer does. A lower bound, which comes near
    ‖K‖ as (σ₂/σ₁)^{2·steps} falls: slowly, since the singular values of a convolution lie close together.

    Nothing is stored between calls, so that every call pays for all its steps. This is how the method serves as a
    reference in Delattre (2023) and Grishina (2024). Ryu et al. themselves, in training, keep x and v and do one step a
    call: that is `Farnia2018`.

    Args:
        steps: how many applications of KᵀK.
        seed: of the random image; the same at every call, so that a call can be repeated.
    """

    steps: int = 100
    seed: int = 0

    guarantee = "lower"
    source = "Ryu, Liu, Wang, Chen, Wang, Yin: Plug-and-Play Methods Provably Converge with Properly Trained Denoisers, ICML 2019"  # fmt: skip  # noqa: E501

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected at least one step, got steps={self.steps}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return without_size(geometry)

    def memory(self, geometry: ConvGeometry, dtype: torch.dtype = torch.float32) -> int:
        """Bytes stored between calls: none."""
        return 0

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        geometry = operator.geometry
        weight, scale = working_weight(operator.weight)
        start = start_vector(geometry.shapes[0], weight, self.seed)
        value, _ = operator_power(ConvOperator(geometry, weight), start, self.steps)
        return NormBound(scale * value, "lower", self)
