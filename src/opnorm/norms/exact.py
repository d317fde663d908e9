"""`Exact`: ‖K‖ itself: eigenvalues where the operator is small, a proof by Cholesky factorisation where it is large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Method, NormBound, rounded_up, working_weight
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.banded import Banded
from opnorm.norms.gram import attach_gradient, smaller_gram
from opnorm.norms.groups import dense_groups, group_weights, without_copies
from opnorm.operator import ConvOperator

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Exact(Method):
    """‖K‖ = √λ_max(KᵀK), one group at a time and only for the groups whose upper bound exceeds the best value so far.

    Groups of up to `dense` rows or columns: eigenvalues of the dense matrix. Larger ones: KᵀK is block tridiagonal, so
    that a block Cholesky factorisation of c·I − KᵀK decides whether c bounds the norm: inverse iteration closes in on
    the smallest such c from both sides, until they agree to `rtol`. Everything in float64, the result rounded up.

    Args:
        rtol: relative accuracy of the norm of large operators.
        dense: the largest matrix to take eigenvalues of.
        workspace: bytes of memory that the factorisation of a group may take.
    """

    rtol: float = 1e-10
    dense: int = 512
    workspace: int = 2**31

    guarantee = "exact"
    source = "this library; eigenvalues by LAPACK"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        if geometry.is_matrix:
            return None
        if not geometry.has_size:
            return f"Exact needs an input size, got {geometry}; choose one with geometry.at(...), or use FourierBound"
        if group_size(geometry) <= self.dense:
            return None
        return Banded.why_not(geometry, self.workspace)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        dtype = torch.promote_types(operator.weight.dtype, torch.float32)
        weight, scale = working_weight(operator.weight, torch.float64)
        if not torch.isfinite(weight).all():  # eigenvalue solvers fail on these, each in its own words
            return NormBound(scale.new_full((), math.nan), "exact", self)
        scaled = ConvOperator(operator.geometry, weight)
        if operator.geometry.is_matrix:
            value, response = spectral_norms(weight.detach().flatten(1)[None])[0], weight.flatten(1)
        elif group_size(operator.geometry) <= self.dense:
            value, response = self._small(scaled)
        else:
            value, response = self._large(scaled)
        if operator.weight.requires_grad:
            value = value * attach_gradient(response)
        return NormBound(rounded_up(scale * value, dtype), "exact", self)

    def _small(self, operator: ConvOperator) -> tuple[Tensor, Tensor]:
        """The norm by eigenvalues, and the dense matrix of the group that has it."""
        axes, weights, bounds = _groups_and_bounds(operator)
        weights, axes = without_copies(weights, axes)
        order = bounds.argsort(descending=True)
        best, top = bounds.new_zeros(()), order[:1]
        for some in order.split(max(1, 2**22 // self.dense**2)):
            some = some[bounds[some] >= best]
            if not len(some):
                break
            norms = spectral_norms(dense_groups(weights[some].detach(), axes))
            if norms.max() >= best:
                best, top = norms.max(), some[norms.argmax()][None]
        return best, dense_groups(weights[top], axes)[0]

    def _large(self, operator: ConvOperator) -> tuple[Tensor, Tensor]:
        """The norm by factorisations, and a row u·K (or column K·v) that has its norm and its gradient."""
        axes, weights, bounds = _groups_and_bounds(operator)
        squared, top, vector, by_output = 0.0, 0, None, False
        for group in bounds.argsort(descending=True).tolist():
            if float(bounds[group]) ** 2 <= squared:
                break
            banded = Banded.of(weights[group].detach(), axes)
            if squared and banded.factor(squared) is not None:
                continue  # a proof that this group's norm is not larger
            above = float(bounds[group]) ** 2
            squared, vector = banded.top_eigenvalue(above, 2 * self.rtol)
            top, by_output = group, banded.by_output
        value = bounds.new_tensor(math.sqrt(squared))
        if vector is None or not operator.weight.requires_grad:
            return value, operator.weight.flatten(1)
        return value, _response_to(operator, top, vector, by_output)


def _groups_and_bounds(operator: ConvOperator) -> tuple[Sequence[Axis], Tensor, Tensor]:
    """The axes, the groups' kernels, and an upper bound of each group's norm, which says which to look at."""
    from opnorm.norms.fourier import FourierBound  # the two call each other

    bounds = FourierBound().compute(operator.detach()).per_channel
    assert bounds is not None
    return operator.geometry.axes, group_weights(operator.weight, operator.geometry), bounds


def _response_to(operator: ConvOperator, group: int, vector: Tensor, by_output: bool) -> Tensor:
    """K v or Kᵀ v as one row, for the singular vector v of one group."""
    geometry = operator.geometry
    to_input = by_output != geometry.transposed  # the vector lives on the operator's output
    read, written = geometry.shapes
    channels, first, *rest = written if to_input else read
    whole = vector.new_zeros(geometry.groups, channels // geometry.groups, first, *rest)
    whole[group] = vector.reshape(first, -1, *rest).movedim(0, 1)  # `Banded` has the first axis before the channels
    apply = operator.rmatvec if to_input else operator.matvec
    return apply(whole.flatten(0, 1)).reshape(1, -1)


def spectral_norms(matrices: Tensor) -> Tensor:
    """√λ_max of the smaller Gram matrix of each of a batch, in float64, rounded up by the error of the solver."""
    gram = smaller_gram(matrices)
    margin = 1 + 4 * _EPS * (gram.shape[-1] + max(matrices.shape[-2:]))
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt() * margin


def group_size(geometry: ConvGeometry) -> int:
    """The smaller side of the dense matrix of one group, without the axes that only copy."""
    outputs, inputs = geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1]
    sizes = [axis.size for axis in geometry.axes if not axis.is_copy]
    return min(inputs * math.prod(s[0] for s in sizes), outputs * math.prod(s[1] for s in sizes))
