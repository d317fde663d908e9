"""The frequencies at which a convolution has to be looked at: twisted circulant embeddings, one axis at a time.

A zero-padded convolution on N inputs is a submatrix of every twisted circulant of size M ≥ N + max(a, b), with the
frequencies 2π(j+φ)/M for any phase φ. Its norm is at most the largest response on that grid, whatever φ is, and so at
most the smallest over φ of these maxima. With stride s only the M/s frequencies of the output remain.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from opnorm.geometry import Axis


@dataclass(frozen=True)
class AxisGrid:
    """The grid of one axis: angles ψ = 2π(j+φ)·turns/points, j < points, φ in phases.

    Attributes:
        kernel: the number of taps k.
        step: of the lags of the kernel's autocorrelation, the stride keeps every `step`-th.
        turns: what one step of those lags multiplies the angle by (more than 1 for some dilations).
        points, phases: the grid, of which only the half up to π is needed on one axis.
        factor: the norm is at most `factor` times the largest response on the grid.
        exact: whether, on this axis, the grid gives the norm itself.
    """

    kernel: int
    step: int
    turns: int
    points: int
    phases: tuple[float, ...]
    factor: float
    exact: bool

    @property
    def degree(self) -> int:
        """The degree n of the response as a trigonometric polynomial in ψ."""
        return (self.kernel - 1) // self.step

    def angles(self, half: bool) -> Tensor:
        """ψ for every phase and point, phases first; `half` keeps 0 ≤ ψ ≤ π of the turn."""
        count = self.points // 2 + 1 if half else self.points
        j = torch.arange(count, dtype=torch.float64)
        return torch.stack([2 * math.pi * self.turns * (j + phase) / self.points for phase in self.phases])


@lru_cache(maxsize=1024)
def axis_grid(axis: Axis, tolerance: float) -> AxisGrid:
    """The grid that bounds a convolution along one axis: its embedding, or a cap at most `tolerance` looser."""
    if axis.inputs is None:
        return _any_size(axis, tolerance)
    if axis.mode == "circular":
        grid = _circular(axis)
    elif axis.mode == "zeros":
        grid = _zero_padded(axis)
    else:
        grid = _valid_on_padded(axis)
    return _capped(grid, tolerance)


def _grid(axis: Axis, stride: int, length: int, phases: tuple[float, ...], factor: float, exact: bool) -> AxisGrid:
    """A circulant of `length` inputs of which every `stride`-th output is kept."""
    common = math.gcd(stride, axis.dilation)
    step = stride // common
    if axis.kernel <= step:  # no two outputs share a tap: the response is constant
        return AxisGrid(axis.kernel, step, 1, 1, (0.0,), factor, exact)
    return AxisGrid(axis.kernel, step, axis.dilation // common, length // stride, phases, factor, exact)


def _zero_padded(axis: Axis) -> AxisGrid:
    before, after, reads = _read(axis)
    if reads < 1:  # every output reads zeros only
        return AxisGrid(axis.kernel, 1, 1, 1, (0.0,), 0.0, True)
    length = reads + max(before, after)
    length += -length % axis.stride
    grid = _grid(axis, axis.stride, length, (0.0, 0.5), 1.0, False)
    orthogonal = grid.degree == 0 and _has_whole_window(axis)
    return AxisGrid(grid.kernel, grid.step, grid.turns, grid.points, grid.phases, 1.0, orthogonal)


def _read(axis: Axis) -> tuple[int, int, int]:
    """Padding before and after, and inputs between, that the outputs which read at least one input really touch."""
    a, s, e, (n, outputs) = axis.before, axis.stride, axis.extent, axis.size
    skipped = max(0, -(-(a - e + 1) // s))  # outputs before the first that reads an input
    outputs = min(outputs, (n - 1 + a) // s + 1) - skipped
    a -= s * skipped
    b = s * (outputs - 1) + e - a - n
    reads = n + min(a, 0) + min(b, 0) if outputs > 0 else 0
    return max(a, 0), max(b, 0), reads


def _has_whole_window(axis: Axis) -> bool:
    inputs, outputs = axis.size
    first = -(-axis.before // axis.stride)
    return first < outputs and axis.stride * first - axis.before + axis.extent <= inputs


def _circular(axis: Axis) -> AxisGrid:
    """Outputs sit at multiples of gcd(s, N) of a circulant of size N, some of them more than once."""
    n, outputs = axis.size
    stride = math.gcd(axis.stride, n)
    distinct = n // stride
    repeats = -(-outputs // distinct)
    exact = stride == axis.stride and outputs == distinct
    return _grid(axis, stride, n, (0.0,), math.sqrt(repeats), exact)


def _valid_on_padded(axis: Axis) -> AxisGrid:
    """‖K‖ ≤ ‖valid convolution on the padded input‖·‖Pad‖, and ‖Pad‖² is how often the most used input appears."""
    padded = axis._replace(before=0, after=0, mode="zeros", inputs=axis.size[0] + axis.before + axis.after)
    grid = _zero_padded(padded)
    factor = math.sqrt(pad_multiplicity(axis))
    return AxisGrid(grid.kernel, grid.step, grid.turns, grid.points, grid.phases, factor, False)


def pad_multiplicity(axis: Axis) -> int:
    """How often the most used input appears in the padded input."""
    if axis.mode == "zeros":
        return 1
    if axis.inputs is None:  # the worst size
        if axis.mode == "replicate":
            return axis.before + axis.after + 1
        return 1 + (axis.before > 0) + (axis.after > 0)
    positions = range(-axis.before, axis.inputs + axis.after)
    return max(Counter(map(axis.source, positions)).values())


def _any_size(axis: Axis, tolerance: float) -> AxisGrid:
    """A grid that bounds the supremum over all frequencies, and with it every input size."""
    circular = axis.mode == "circular"
    step = 1 if circular else axis.stride // math.gcd(axis.stride, axis.dilation)
    factor = math.sqrt(pad_multiplicity(axis)) if axis.mode != "zeros" else 1.0
    if circular and axis.before + axis.after < axis.extent:
        factor = 1.0  # no more outputs than inputs, so that none repeats
    degree = (axis.kernel - 1) // step
    if degree == 0:
        return AxisGrid(axis.kernel, step, 1, 1, (0.0,), factor, False)
    points = points_within(degree, tolerance)
    return AxisGrid(axis.kernel, step, 1, points, (0.0,), factor * slack(degree, points), False)


def _capped(grid: AxisGrid, tolerance: float) -> AxisGrid:
    """The any-size grid instead of an embedding, where it has no more points than one phase of the embedding."""
    if grid.degree == 0:
        return grid
    points = points_within(grid.degree, tolerance)
    if points > grid.points or (len(grid.phases) == 1 and 2 * points > grid.points):
        return grid
    factor = grid.factor * slack(grid.degree, points)
    return AxisGrid(grid.kernel, grid.step, 1, points, (0.0,), factor, False)


def slack(degree: int, points: int) -> float:
    """1/cos(πn/2G): how far sqrt(P), P ≥ 0 of degree n, can rise above its values on any G > n equispaced points.

    By M. Riesz, P falls from its maximum no faster than cos²(nh/2), and no point is further than h = π/G from the grid.
    """
    return 1 / math.cos(math.pi * degree / (2 * points))


def points_within(degree: int, tolerance: float) -> int:
    """The fewest points G with slack at most 1 + tolerance."""
    return math.ceil(math.pi * degree / (2 * math.acos(1 / (1 + tolerance))))
