"""`Miyato2018`: the norm of the reshaped kernel, which `torch.nn.utils.parametrizations.spectral_norm` divides by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opnorm.bound import Guarantee, Method, NormBound, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.baselines.iteration import normalised, warm_vector
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class Miyato2018(Method):
    """σ = uᵀWv of the kernel as a matrix W: C_out × (C_in Πk), by u = Wv/‖Wv‖, v = Wᵀu/‖Wᵀu‖ from the last v.

    For a linear layer, and a 1×1 convolution, W is the operator, and σ a lower bound of its norm. For any other
    convolution there is no guarantee: input size, padding, stride, dilation and groups do not enter. Without groups,
    and with a window that fits the input, W is a submatrix of K, and σ too small, by up to the √m of `Tsuzuku2018`.
    Groups are stacked, as in torch, so that σ may be too large, by up to the root of their number. As in torch, a
    transposed convolution is reshaped with its second dimension first.

    Args:
        n_power_iterations: how many steps a call; warm starts make up for a single one.
        seed: of the vector that the iteration starts from when there is no state.
    """

    n_power_iterations: int = 1
    seed: int = 0

    guarantee = "none"
    source = "Miyato, Kataoka, Koyama, Yoshida: Spectral Normalization for Generative Adversarial Networks, ICLR 2018"

    def __post_init__(self) -> None:
        if self.n_power_iterations < 1:
            raise ValueError(f"expected at least one step, got n_power_iterations={self.n_power_iterations}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return None

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        matrix = (weight.transpose(0, 1) if operator.geometry.transposed else weight).flatten(1)
        v = warm_vector(state, (matrix.shape[1],), matrix, self.seed)
        with torch.no_grad():
            for _ in range(self.n_power_iterations):
                u = normalised(matrix @ v)
                v = normalised(matrix.T @ u, otherwise=v)
        guarantee: Guarantee = "lower" if operator.geometry.is_matrix else "none"
        return NormBound(scale * torch.dot(u, matrix @ v), guarantee, self, state=v)
