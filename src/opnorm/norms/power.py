"""`PowerIteration`: v ← KᵀKv / ‖KᵀKv‖, σ = ‖Kv‖, from the vector of the last call, until ‖KᵀKv − σ²v‖ < ε σ²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Guarantee, Method, NormBound, rounded_up, working_weight
from opnorm.geometry import ConvGeometry
from opnorm.norms.gram import smaller_gram
from opnorm.operator import ConvOperator


@dataclass(frozen=True)
class PowerIteration(Method):
    """σ = ‖Kv‖ ≤ ‖K‖ with v ← KᵀKv / ‖KᵀKv‖, warm-started, until ‖KᵀKv − σ²v‖ < ε σ², the paper's rule made relative.

    Linear and pointwise layers: on the connectivity matrix, so that the state is one vector of C_in numbers. Other
    layers: on the whole operator, and the state has the size of the input.

    Args:
        eps: the residual at which to stop. The published rule is absolute; this one follows the scale of K.
        max_iter: when to stop in any case.
        prove: linear and pointwise layers only: raise σ by the smallest of eps/2, eps, 2·eps, ... for which a Cholesky
            factorisation of (1+δ)²σ²I − KᵀK, in float64, proves that the value is an upper bound.
    """

    eps: float = 0.01
    max_iter: int = 1000
    prove: bool = False

    source = "Runkel, Etmann et al. (2021), section 3.2; the proof is ours"

    def __post_init__(self) -> None:
        if self.eps <= 0 or self.max_iter < 1:
            raise ValueError(
                f"expected eps > 0 and max_iter of at least 1, got eps={self.eps}, max_iter={self.max_iter}"
            )

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]
        """`"upper"` with `prove`, otherwise `"lower"`: an iteration never exceeds the norm, but may stop short."""
        return "upper" if self.prove else "lower"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        if self.prove and not geometry.is_matrix:
            return f"PowerIteration(prove=True) takes linear and pointwise layers, got {geometry}; use FourierBound"
        if not geometry.is_matrix and not geometry.has_size:
            return f"PowerIteration needs an input size, got {geometry}; choose one with geometry.at(...)"
        return None

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        dtype = torch.promote_types(operator.weight.dtype, torch.float32)
        weight, scale = working_weight(operator.weight)
        scaled = ConvOperator(operator.geometry, weight)
        if operator.geometry.is_matrix:
            scaled = _as_linear(scaled)
        with torch.no_grad():
            v = self._iterate(scaled.detach(), state)
            image = scaled.detach().matvec(v)
            sigma = torch.linalg.vector_norm(image)
        if operator.weight.requires_grad:
            sigma = _differentiable(scaled, v, image, sigma)
        if self.prove:
            sigma = sigma * self._raise(scaled.weight.detach().flatten(1), sigma.detach())
        value = rounded_up((scale * sigma).to(sigma.dtype), dtype)
        return NormBound(value, self.guarantee, self, state=v.to(operator.weight.device))

    def _iterate(self, operator: ConvOperator, state: Tensor | None) -> Tensor:
        v = self._start(operator, state)
        for _ in range(self.max_iter):
            w = operator.rmatvec(operator.matvec(v))
            squared = (v * w).sum()
            residual, size = torch.linalg.vector_norm(w - squared * v), torch.linalg.vector_norm(w)
            if not size > 0:  # the zero operator, or NaN, which is reported by the caller
                return v
            v = w / size
            if residual < self.eps * squared:
                break
        return v

    def _start(self, operator: ConvOperator, state: Tensor | None) -> Tensor:
        shape, like = operator.geometry.shapes[0], operator.weight
        if state is None:
            generator = torch.Generator().manual_seed(0)  # the same start on every device
            state = torch.randn(shape, generator=generator, dtype=torch.float64)
        elif not isinstance(state, Tensor) or tuple(state.shape) != shape:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(
                f"expected the state as a vector of shape {shape}, got {got}; pass the state of this layer"
            )
        v = state.to(like)
        size = torch.linalg.vector_norm(v)
        return v / size if size > 0 else self._start(operator, None)

    def _raise(self, matrix: Tensor, sigma: Tensor) -> Tensor:
        """1 + δ such that (1+δ)σ is proved to be an upper bound of the norm of the matrix."""
        gram, delta = smaller_gram(matrix.double()), self.eps / 2
        unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        # Rounding of the product and of the factorisation, both relative to a trace, which is at most r·bound.
        safety = 8 * torch.finfo(gram.dtype).eps * (len(gram) + max(matrix.shape)) * len(gram)
        while True:
            factor = 1 + sigma.new_tensor(delta)
            bound = (factor * sigma).double().square() * (1 - safety)
            if not sigma > 0 or not torch.linalg.cholesky_ex(bound * unit - gram).info:
                return factor
            delta *= 2


def _as_linear(operator: ConvOperator) -> ConvOperator:
    """A pointwise layer as the linear layer of its connectivity matrix, in its own direction."""
    g = operator.geometry
    matrix = operator.weight.flatten(1)
    if g.transposed:
        matrix = matrix.mT
    return ConvOperator(ConvGeometry(g.in_channels, g.out_channels, (), ()), matrix)


def _differentiable(operator: ConvOperator, v: Tensor, image: Tensor, sigma: Tensor) -> Tensor:
    """σ with the gradient uᵀ ∂K v, u = Kv/σ, and with gradient zero where σ is."""
    u = image / torch.where(sigma > 0, sigma, torch.ones_like(sigma))
    moved = (u * operator.matvec(v)).sum()
    return sigma + moved - moved.detach()
