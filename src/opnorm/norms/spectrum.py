"""The largest responses of many kernels over a grid of frequencies, without ever storing a whole spectrum.

A response P is a trigonometric polynomial of degree k-1 an axis, so its values at 2k-1 angles an axis are all of it:
they are computed once, by one matrix product with the kernels, and the grid is reached from there by real
interpolation matrices, one axis after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opnorm.bound import roundoff
from opnorm.norms.embedding import AxisGrid
from opnorm.norms.gram import smaller_gram, top_eigenvalues
from opnorm.norms.groups import alias_matrix

_TABLES: dict[tuple, Tables] = {}


@dataclass(frozen=True, eq=False)
class Tables:
    """What `scalar_peaks` multiplies by; depends on the grids alone, and is kept.

    Attributes:
        fourier: (taps, 2 · coarse points), cosines then sines.
        interpolate: an axis each, (coarse angles, phases · points), the last over half a turn.
        growth: how far interpolation can exceed the largest coarse value, Π of the largest absolute row sums.
    """

    fourier: Tensor
    interpolate: tuple[Tensor, ...]
    growth: float

    @classmethod
    def of(cls, grids: Sequence[AxisGrid], like: Tensor) -> Tables:
        """The tables for these grids in the precision and on the device of `like`, from the cache if they are there."""
        key = (tuple(grids), like.dtype, like.device)
        if key not in _TABLES:
            tables = cls(
                _fourier(grids).to(like),
                tuple(_interpolation(g, half=i == len(grids) - 1).to(like) for i, g in enumerate(grids)),
                math.prod(float(_interpolation(g, half=False).abs().sum(0).max()) for g in grids),
            )
            if type(tables.fourier) is not Tensor:  # fake tensors of a compiler or exporter must not stay behind
                return tables
            _TABLES[key] = tables
        return _TABLES[key]


def _coarse(grid: AxisGrid) -> Tensor:
    count = 2 * grid.kernel - 1
    return 2 * math.pi * torch.arange(count, dtype=torch.float64) / count


def _fourier(grids: Sequence[AxisGrid]) -> Tensor:
    angle = torch.zeros(1, 1, dtype=torch.float64)
    for grid in grids:
        turn = torch.outer(torch.arange(grid.kernel, dtype=torch.float64), _coarse(grid))
        angle = (angle[:, None, :, None] + turn[None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.cat([angle.cos(), angle.sin()], 1)


def _interpolation(grid: AxisGrid, half: bool) -> Tensor:
    """From P at the coarse angles ν to the polynomial of the lags that the stride keeps, at the grid's angles ψ."""
    lags = torch.arange(-grid.degree, grid.degree + 1, dtype=torch.float64)
    turn = grid.angles(half).flatten()[:, None, None] - grid.step * _coarse(grid)[:, None]
    return ((turn * lags).cos().sum(-1) / (2 * grid.kernel - 1)).T.contiguous()


def coarse_power(kernels: Tensor, tables: Tables) -> Tensor:
    """P = Σ over members of |θ̂|² at the coarse angles, for kernels (channels, members, taps)."""
    waves = kernels.flatten(0, 1) @ tables.fourier
    real, imag = waves.chunk(2, dim=1)
    return (real * real + imag * imag).reshape(*kernels.shape[:2], -1).sum(1)


def scalar_peaks(kernels: Tensor, grids: Sequence[AxisGrid], workspace: int) -> Tensor:
    """min over phases of max over points of P, rounded up, for each of the kernels (channels, members, taps)."""
    power = coarse_power(kernels, Tables.of(grids, kernels))
    return grid_peaks(power, coarse_rounding(kernels, power, grids), grids, workspace)


def grid_peaks(power: Tensor, rounding: Tensor, grids: Sequence[AxisGrid], workspace: int) -> Tensor:
    """The same from P at the coarse angles, and what rounding does to it: all grids of one kernel size share them."""
    tables = Tables.of(grids, power)
    rows, last = _interpolate_all_but_last(power, grids, tables), grids[-1]
    table = tables.interpolate[-1]
    flat = rows.reshape(-1, table.shape[0])
    peaks = flat.new_empty(len(flat), len(last.phases))
    step = max(1, workspace // (table.shape[1] * table.element_size()))
    for start in range(0, len(flat), step):
        block = flat[start : start + step] @ table
        torch.amax(block.unflatten(1, (len(last.phases), -1)), 2, out=peaks[start : start + step])
    peaks = peaks.reshape(*rows.shape[:-1], len(last.phases))
    for axis, grid in enumerate(grids[:-1], 1):
        peaks = peaks.unflatten(axis, (len(grid.phases), -1)).amax(axis + 1)
    factor = math.prod(g.factor for g in grids) ** 2
    return factor * torch.add(peaks.flatten(1).amin(1), rounding, alpha=tables.growth)


def _interpolate_all_but_last(power: Tensor, grids: Sequence[AxisGrid], tables: Tables) -> Tensor:
    """(channels, phases · points of every axis but the last, coarse angles of the last)."""
    values = power.reshape(len(power), *(2 * g.kernel - 1 for g in grids))
    for table in tables.interpolate[:-1]:
        values = values.movedim(1, -1) @ table  # the axis in front becomes the last one
    return values.movedim(1, -1).contiguous()


def coarse_rounding(kernels: Tensor, power: Tensor, grids: Sequence[AxisGrid]) -> Tensor:
    """By how much rounding may have pushed the values of P of each kernel below the truth, but for a factor `growth`.

    θ̂ is a sum of `taps` products, its real and imaginary part off by at most (taps + 4)u Σ|θ|; P by 2√2 |θ̂| times
    that, and by its own sum over members. Interpolation multiplies these errors by at most `growth`, and each axis adds
    (coarse angles + 4)u times the largest value. Twice the sum covers the terms in u².
    """
    taps, members, u = kernels.shape[2], kernels.shape[1], roundoff(kernels)
    largest = power.amax(1)
    absolute = torch.linalg.vector_norm(kernels.abs().sum(2), dim=1)
    terms = members + 4 + sum(2 * g.kernel + 3 for g in grids)
    return 2 * u * (2.83 * (taps + 4) * absolute * largest.sqrt() + terms * largest)


def phase_angles(grids: Sequence[AxisGrid]) -> Tensor:
    """(phases, points, dim): the angles ψ of the grid, half a turn of the last axis, for each combination of phases."""
    axes = [grid.angles(half=i == len(grids) - 1) for i, grid in enumerate(grids)]
    choices = itertools.product(*axes)
    return (
        torch.stack([torch.cartesian_prod(*c).reshape(-1, len(grids)) for c in choices])
        if grids
        else torch.zeros(1, 1, 0)
    )


def matrix_peaks(weights: Tensor, grids: Sequence[AxisGrid], workspace: int) -> tuple[Tensor, Tensor]:
    """min over phases of max over points of ‖θ̂‖², rounded up, of each group, and the angles (groups, dim) where it is.

    Args:
        weights: (groups, outputs, inputs, *kernel) in double precision.
    """
    angles = phase_angles(grids).to(weights)
    entries = math.prod(weights.shape[:3]) * math.prod(g.step for g in grids)
    step = max(1, workspace // (16 * entries))
    bounds = torch.stack([_matrix_bounds(weights, grids, phase, step) for phase in angles])  # (phases, groups, points)
    peaks, points = bounds.max(2)
    peaks, phases = peaks.min(0)
    at = angles[phases, points.gather(0, phases[None])[0]]
    return math.prod(g.factor for g in grids) ** 2 * peaks, at


def _matrix_bounds(weights: Tensor, grids: Sequence[AxisGrid], angles: Tensor, step: int) -> Tensor:
    """‖θ̂(ψ)‖² ≤ each of (groups, points), tight where it is the largest of its group."""
    groups = torch.arange(len(weights), device=weights.device)
    lowest = weights.new_full((len(weights),), -math.inf)
    bounds = []
    for block in angles.split(step):
        matrices = alias_matrix(weights, grids, block).flatten(0, 1)
        terms = weights[0, 0, 0].numel() + max(matrices.shape[-2:])
        segments = groups.repeat_interleave(len(block))
        top = top_eigenvalues(smaller_gram(matrices), terms=terms, lowest=lowest, segments=segments)
        bounds.append(top.reshape(len(weights), -1))
    return torch.cat(bounds, 1)


def scalar_peak_angles(kernel: Tensor, grids: Sequence[AxisGrid]) -> Tensor:
    """The angles ψ, (dim,), at which `scalar_peaks` finds the bound of one kernel (members, taps)."""
    tables = Tables.of(grids, kernel)
    values = _interpolate_all_but_last(coarse_power(kernel[None], tables), grids, tables) @ tables.interpolate[-1]
    for axis, grid in enumerate(grids):  # (1, points..) -> (1, phases, points, phases, points, ..)
        values = values.unflatten(1 + 2 * axis, (len(grid.phases), -1))
    dim = len(grids)
    order = [*range(1, 2 * dim, 2), *range(2, 2 * dim + 1, 2)]
    values = values.permute(0, *order).flatten(1, dim).flatten(2)[0]  # (phases, points)
    peaks, points = values.max(1)
    phase = peaks.argmin()
    return phase_angles(grids).to(kernel)[phase, points[phase]]
