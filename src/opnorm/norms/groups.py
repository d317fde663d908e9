"""One group of a convolution at a time: its kernels, its response at one frequency, its dense matrix.

A grouped convolution is block diagonal, so that its norm is the largest of its groups' norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.embedding import AxisGrid


def group_weights(weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """The weight as (groups, outputs of a group, inputs of a group, *kernel), of the adjoint if transposed."""
    return weight.reshape(geometry.groups, -1, *weight.shape[1:])


def has_scalar_response(outputs: int, inputs: int, grids: Sequence[AxisGrid]) -> bool:
    """Whether a group's response at a frequency is a row or a column, whose norm is the root of a sum of squares."""
    return bool(grids) and (outputs == 1 or (inputs == 1 and all(g.step == 1 for g in grids)))


def alias_matrix(weight: Tensor, grids: Sequence[AxisGrid], angles: Tensor) -> Tensor:
    """θ̂ at the aliases (ψ + 2πl)/t of the angles ψ, side by side, divided by √(Π t).

    Args:
        weight: (..., outputs, inputs, *kernel).
        angles: (frequencies, dim).

    Returns:
        (..., frequencies, outputs, inputs · aliases), complex.
    """
    dim = len(grids)
    steps = math.prod(g.step for g in grids)
    waves = angles.new_ones(len(angles), 1, 1)  # (frequencies, aliases, taps), one axis after the other
    phase = torch.zeros_like(waves)
    for axis, grid in enumerate(grids):
        shifts = torch.arange(grid.step, dtype=angles.dtype, device=angles.device)
        nu = (angles[:, axis, None] + 2 * math.pi * shifts) / grid.step  # (frequencies, aliases)
        taps = torch.arange(grid.kernel, dtype=angles.dtype, device=angles.device)
        turn = nu[:, :, None] * taps  # (frequencies, aliases, taps)
        phase = (phase[:, :, None, :, None] + turn[:, None, :, None, :]).flatten(3, 4).flatten(1, 2)
    basis = torch.polar(torch.ones_like(phase), phase) / math.sqrt(steps)
    flat = weight.flatten(-dim) if dim else weight[..., None]  # (..., outputs, inputs, taps)
    flat = flat.to(basis.dtype)
    response = torch.einsum("...oit,fat->...foia", flat, basis)
    return response.flatten(-2)


def dense_groups(weights: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The dense matrices (groups, outputs · positions, inputs · positions) of groups of a convolution."""
    result = weights  # (g, o, i, k1, .., kd) -> (g, o, i, y1, x1, .., yd, xd)
    dim = len(axes)
    for axis in axes:
        taps = _tap_matrix(axis, weights)
        result = torch.tensordot(result, taps, dims=([3], [0]))  # the next kernel axis is always third
    order = [0, 1, *range(3, 3 + 2 * dim, 2), 2, *range(4, 4 + 2 * dim, 2)]
    return result.permute(order).reshape(len(weights), *group_shape(weights, axes))


def gram_matrices(weights: Tensor, axes: Sequence[Axis]) -> Tensor:
    """AAᵀ or AᵀA, whichever is smaller, of the dense matrices A of groups, with the rows in another order.

    A = Σ_p T_p ⊗ M_p over the taps p of the first axis, T_p zeros and ones and M_p the matrix of a slice of the kernel,
    so that AAᵀ = Σ_pq T_p T_qᵀ ⊗ M_p M_qᵀ: for large images far fewer products than those of A with itself.
    """
    rows, columns = group_shape(weights, axes)
    by_output, first = rows <= columns, axes[0]
    slices = dense_groups(weights.movedim(3, 1).flatten(0, 1), axes[1:])  # (groups · taps, rows, columns) of slices
    slices = slices if by_output else slices.mT
    count, taps, side = len(weights), first.kernel, slices.shape[1]
    stacked = slices.reshape(count, taps * side, -1)
    products = (stacked @ stacked.mT).view(count, taps, side, taps, side)
    met = _meetings(first, by_output).to(weights)  # (positions², taps²)
    positions = first.size[by_output]
    gram = met @ products.permute(0, 1, 3, 2, 4).reshape(count, taps**2, side**2)
    gram = gram.view(count, positions, positions, side, side).transpose(2, 3)
    return gram.reshape(count, positions * side, positions * side)


def without_copies(weights: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, list[Axis]]:
    """The kernels and axes without the axes that only copy: the operator is many copies of what is left."""
    kept = [i for i, axis in enumerate(axes) if not axis.is_copy]
    return weights.reshape(*weights.shape[:3], *(axes[i].kernel for i in kept)), [axes[i] for i in kept]


def group_shape(weights: Tensor, axes: Sequence[Axis]) -> tuple[int, int]:
    """The rows and columns of the dense matrix of one group."""
    sizes = [axis.size for axis in axes]
    return weights.shape[1] * math.prod(s[1] for s in sizes), weights.shape[2] * math.prod(s[0] for s in sizes)


def _tap_matrix(axis: Axis, like: Tensor) -> Tensor:
    """(taps, outputs, inputs): which tap connects an output to an input."""
    return _connections(axis).to(like)


@lru_cache(maxsize=256)
def _connections(axis: Axis) -> Tensor:
    inputs, outputs = axis.size
    sources = torch.tensor([[-1 if q is None else q for q in axis.reads(i)] for i in range(outputs)])
    return (sources.T[..., None] == torch.arange(inputs)).double()


@lru_cache(maxsize=256)
def _meetings(axis: Axis, by_output: bool) -> Tensor:
    """(positions², taps²): how often tap p at one position and q at another read, or are read by, the same place."""
    taps = _connections(axis) if by_output else _connections(axis).mT
    return torch.einsum("pis,qjs->ijpq", taps, taps).reshape(taps.shape[1] ** 2, -1)
