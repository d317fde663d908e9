"""`enclosed_norms`: the norm of every channel of a depthwise layer by itself, from both sides, many channels at once.

From below by a Lanczos iteration, from above by a Cholesky factorisation that proves it: two methods that share no
code with the bounds that are compared with them, nor with the library's own exact values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opnorm import ConvGeometry, ConvOperator
from opnorm.geometry import Axis
from opnorm.norms.groups import dense_groups

DENSE = 256  # rows up to which eigenvalues of the whole matrix are quicker
WORKSPACE = 2**27  # bytes for the blocks of the channels that are looked at together
CHECK = 20  # Lanczos steps between two looks at the result
ROUNDING = 1e-11  # what a factorisation in double precision may be off by, with room to spare
Blocks = dict[tuple[int, int], Tensor]


class Enclosed(NamedTuple):
    """lower ≤ ‖K_c‖ ≤ upper, each (channels,)."""

    lower: Tensor
    upper: Tensor


def enclosed_norms(operator: ConvOperator, rtol: float = 1e-5) -> Enclosed:
    """The norm of each channel with upper = lower·(1 + rtol), or nearer.

    Args:
        operator: depthwise, with one output a channel; zero padding.
        rtol: how far apart the two sides may be.
    """
    geometry, weight = operator.geometry, operator.weight.detach().double()
    if geometry.weight_shape[:2] != (geometry.groups, 1) or geometry.padding_mode != "zeros":
        raise ValueError(f"expected a zero-padded depthwise layer with one output a channel, got {geometry}")
    if not (torch.isfinite(weight).all() and weight.flatten(1).any(1).all()):
        raise ValueError("expected finite kernels that are not zero, got others; their norms need no proof")
    rows = math.prod(axis.size[1] for axis in geometry.axes)
    if rows <= DENSE:
        parts = [_by_eigenvalues(some, geometry.axes) for some in weight.split(max(1, WORKSPACE // (16 * rows**2)))]
    else:
        side = rows // geometry.axes[0].size[1] * _width(geometry.axes[0])
        room = 8 * (8 * side**2 + 8 * rows)
        parts = [_by_proof(some, geometry, rtol) for some in weight.split(max(1, WORKSPACE // room))]
    return Enclosed(*map(torch.cat, zip(*parts, strict=True)))


def one_channel_each(geometry: ConvGeometry, weight: Tensor) -> ConvOperator:
    """The depthwise layer of the same geometry that has these kernels (channels, 1, *kernel)."""
    g, channels = geometry, len(weight)
    again = ConvGeometry(
        channels, channels, g.kernel_size, g.input_size, stride=g.stride, padding=g.padding, dilation=g.dilation,
        groups=channels,
    )  # fmt: skip
    return ConvOperator(again, weight)


def _by_eigenvalues(weight: Tensor, axes: Sequence[Axis]) -> Enclosed:
    matrices = dense_groups(weight[:, None], axes)
    largest = torch.linalg.eigvalsh(matrices @ matrices.mT)[:, -1].clamp(min=0).sqrt()
    return Enclosed(largest * (1 - ROUNDING), largest * (1 + ROUNDING))


def _by_proof(weight: Tensor, geometry: ConvGeometry, rtol: float) -> Enclosed:
    """Lanczos until a factorisation proves that its value is within rtol; from a random vector where that fails."""
    lower = weight.new_zeros(len(weight))
    open_ = torch.arange(len(weight), device=weight.device)
    start, settled = _waves(weight, geometry), rtol / 10
    while len(open_):
        operator = one_channel_each(geometry, weight[open_])
        found = _lanczos(operator, start, settled)
        lower[open_] = torch.maximum(lower[open_], found)
        proved = _is_above(weight[open_], geometry.axes, ((1 + rtol) * lower[open_]) ** 2)
        open_, settled = open_[~proved], settled / 10
        start = torch.randn(len(open_), *operator.geometry.shapes[1][1:], dtype=weight.dtype, device=weight.device)
    return Enclosed(lower, (1 + rtol) * lower)


def _lanczos(operator: ConvOperator, start: Tensor, settled: float) -> Tensor:
    """√λ_max of the Lanczos matrices of KKᵀ, a channel each, when `CHECK` steps change none by more than `settled`."""
    length = tuple(range(1, start.dim()))

    def spread(x: Tensor) -> Tensor:
        return x.view(-1, *(1 for _ in length))

    v = start / spread(torch.linalg.vector_norm(start, dim=length))
    before, beta = torch.zeros_like(v), v.new_zeros(len(v))
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    value = v.new_zeros(len(v))
    while True:
        for _ in range(CHECK):
            w = operator.matvec(operator.rmatvec(v)) - spread(beta) * before
            alpha = (w * v).sum(length)
            w -= spread(alpha) * v
            beta = torch.linalg.vector_norm(w, dim=length)
            before, v = v, w / spread(beta.clamp(min=1e-300))
            diagonal.append(alpha)
            beside.append(beta)
        off = torch.stack(beside[:-1], 1)
        matrix = torch.diag_embed(torch.stack(diagonal, 1)) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        last, value = value, torch.linalg.eigvalsh(matrix)[:, -1].clamp(min=0).sqrt()
        if bool((value - last <= settled * value).all()):
            return value


def _waves(weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Where to start: on the output, the wave of largest response under half a period of a sine in each direction."""
    outputs, dim = geometry.shapes[1][1:], geometry.dim
    points = [64 * axis.stride for axis in geometry.axes]
    power = torch.fft.fftn(weight[:, 0], s=points, dim=tuple(range(1, dim + 1))).abs().square()
    for axis, stride in enumerate(geometry.stride, 1):
        power = power.unflatten(axis, (stride, 64)).mean(axis)  # frequencies that the stride cannot tell apart
    peaks = torch.stack(torch.unravel_index(power.flatten(1).argmax(1), power.shape[1:]), 1)  # (channels, dim)
    turn, window = weight.new_zeros(()), weight.new_ones(())
    for axis, size in enumerate(outputs):
        shape = [1] * (dim + 1)
        shape[axis + 1] = size
        place = torch.arange(size, dtype=weight.dtype, device=weight.device).view(shape)
        turn = turn + place * (2 * math.pi / 64 * peaks[:, axis]).view(-1, *[1] * dim)
        window = window * torch.sin(math.pi * (place + 1) / (size + 1))
    return window * torch.cos(turn + 0.5)  # any phase will do that is not special


def _is_above(weight: Tensor, axes: Sequence[Axis], squared: Tensor) -> Tensor:
    """Whether c·I − KKᵀ is positive definite, a channel each: KKᵀ is block tridiagonal along the first axis."""
    first, outputs = axes[0], axes[0].size[1]
    slices = [dense_groups(weight[:, None, :, tap], axes[1:]) for tap in range(first.kernel)]
    products = [[a @ b.mT for b in slices] for a in slices]
    pairs, width = _couplings(first), _width(first)
    good = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    factor: Tensor | None = None
    for begin in range(0, outputs, width):
        rows = range(begin, min(begin + width, outputs))
        matrix = -_block(rows, rows, pairs, products)
        matrix.diagonal(dim1=1, dim2=2).add_((squared * (1 - ROUNDING))[:, None])
        if factor is not None:
            below = _block(rows, range(begin - width, begin), pairs, products)
            left = torch.linalg.solve_triangular(factor.mT, below, upper=True, left=False)
            matrix = torch.baddbmm(matrix, left, left.mT, alpha=-1)
        factor, info = torch.linalg.cholesky_ex(matrix)
        good &= info == 0
        factor = torch.where(good[:, None, None], factor, torch.eye(factor.shape[-1]).to(factor))
    return good


def _couplings(axis: Axis) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For outputs o ≥ o' along an axis, the taps (p, q) by which both read the same input."""
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for output in range(axis.size[1]):
        for tap, source in enumerate(axis.reads(output)):
            if source is not None:
                readers[source].append((output, tap))
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for reads in readers.values():
        for o, p in reads:
            for other, q in reads:
                if o >= other:
                    pairs[o, other].append((p, q))
    return pairs


def _width(axis: Axis) -> int:
    """How many outputs go into a block so that only neighbouring blocks meet."""
    return max(1, max((o - other for o, other in _couplings(axis)), default=1))


def _block(
    rows: range, columns: range, pairs: dict[tuple[int, int], list[tuple[int, int]]], products: list[list[Tensor]]
) -> Tensor:
    """The rows and columns of KKᵀ that belong to these outputs along the first axis."""
    channels, side = products[0][0].shape[:2]
    block = products[0][0].new_zeros(channels, len(rows), side, len(columns), side)
    for i, o in enumerate(rows):
        for j, other in enumerate(columns):
            for p, q in pairs.get((max(o, other), min(o, other)), ()):
                product = products[p][q] if o >= other else products[p][q].mT
                block[:, i, :, j] += product
    return block.reshape(channels, len(rows) * side, len(columns) * side)
