"""What the power iterations share: where they start, and what they do at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opnorm.operator import ConvOperator


def start_vector(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """A random unit vector, the same on every device and in every process: global random numbers are left alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(like)
    return x / torch.linalg.vector_norm(x)


def warm_vector(state: Any, shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """The vector that an earlier call handed back, or a random one where there was none."""
    if state is None:
        return start_vector(shape, like, seed)
    if not isinstance(state, Tensor) or tuple(state.shape) != shape:
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"expected the state of an earlier call, of shape {shape}, got {got}; pass state=None")
    return state.to(like)


def normalised(x: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """x/‖x‖; where x is zero, `otherwise` (or x itself), so that no iteration is stuck at zero ever after."""
    size = torch.linalg.vector_norm(x)
    return torch.where(size > 0, x / torch.where(size > 0, size, 1.0), x if otherwise is None else otherwise)


def operator_power(operator: ConvOperator, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """v = Kx/‖Kx‖, x = Kᵀv/‖Kᵀv‖, `steps` times: the value ⟨v, Kx⟩ = ‖Kᵀv‖ ≤ ‖K‖, and the last x."""
    still = operator.detach()
    with torch.no_grad():
        for _ in range(steps):
            v = normalised(still.matvec(x))
            x = normalised(still.rmatvec(v), otherwise=x)
    return (v * operator.matvec(x)).sum(), x
