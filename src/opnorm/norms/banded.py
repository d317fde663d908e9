"""`Banded`: the Gram matrix of one group of a convolution as a block tridiagonal matrix along its first axis."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.groups import dense_groups

Factor = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Banded:
    """A = KᵀK, or KKᵀ where that is smaller (`by_output`): diagonal blocks, and the blocks below them.

    Two slices of the input along the first axis only meet in A where one window reads both, and two slices of the
    output where they read the same input: blocks as wide as the furthest such pair couple to their neighbours alone.
    """

    diagonal: list[Tensor]
    below: list[Tensor]
    by_output: bool

    @classmethod
    def why_not(cls, geometry: ConvGeometry, workspace: int) -> str | None:
        """Why a geometry is out of reach, or None."""
        first = geometry.axes[0]
        if first.mode == "circular":
            return f"Exact takes small operators only where the padding is circular, got {geometry}; use FourierBound"
        slices, width, size = _plan(geometry)
        needed = 4 * 8 * -(-slices // width) * (width * size) ** 2
        if needed > workspace:
            return (
                f"Exact would need {needed / 2**30:.1f} GiB for a group of {geometry}, more than its workspace of "
                f"{workspace / 2**30:.1f} GiB; use FourierBound, or Exact(workspace=...)"
            )
        return None

    @classmethod
    def of(cls, weight: Tensor, axes: Sequence[Axis]) -> Banded:
        """Assemble A from the kernels (outputs, inputs, *kernel) of one group."""
        first, by_output = axes[0], _by_output(weight.shape[0], weight.shape[1], axes)
        slices = [dense_groups(weight[None, :, :, tap], axes[1:])[0] for tap in range(first.kernel)]
        if by_output:
            products = [[a @ b.mT for b in slices] for a in slices]
        else:
            products = [[a.mT @ b for b in slices] for a in slices]
        pairs = _couplings(first, by_output)
        return cls(*_assemble(pairs, products, first.size[by_output], _width(pairs)), by_output)

    def factor(self, shift: float) -> Factor | None:
        """The block Cholesky factor of shift·I − A; None if that is not positive definite, so that λ_max(A) ≥ shift."""
        factors: Factor = []
        for block, diagonal in enumerate(self.diagonal):
            matrix = -diagonal
            matrix.diagonal().add_(shift)
            left = None
            if block:
                left = torch.linalg.solve_triangular(factors[-1][0].mT, -self.below[block - 1], upper=True, left=False)
                matrix = matrix - left @ left.mT
            lower, info = torch.linalg.cholesky_ex(matrix)
            if info:
                return None
            factors.append((lower, left))
        return factors

    def matvec(self, blocks: list[Tensor]) -> list[Tensor]:
        """A v."""
        result = [d @ v for d, v in zip(self.diagonal, blocks, strict=True)]
        for j, e in enumerate(self.below):
            result[j + 1] = result[j + 1] + e @ blocks[j]
            result[j] = result[j] + e.mT @ blocks[j + 1]
        return result

    def top_eigenvalue(self, above: float, rtol: float) -> tuple[float, Tensor]:
        """The smallest c found with c·I − A proved positive definite, c(1 − rtol) ≤ λ_max < c, and the eigenvector.

        Inverse iteration with c·I − A converges to the eigenvector of λ_max, faster the closer c is; its Rayleigh
        quotient bounds λ_max from below. Then a smaller c is tried between the two.

        Args:
            above: an upper bound of λ_max.
        """
        if not any(bool(d.diagonal().any()) for d in self.diagonal):
            return 0.0, torch.cat([d.new_zeros(len(d)) for d in self.diagonal])  # A ≥ 0 without a trace is zero
        if not math.isfinite(above):  # NaN weights: no factorisation ever succeeds; operator_norm says what is wrong
            return math.nan, torch.cat([d.diagonal() for d in self.diagonal])
        upper = above * (1 + rtol)
        factor = self.factor(upper)
        while factor is None:  # `above` was the eigenvalue itself, and rounding hides it
            upper *= 1 + 10 * rtol
            factor = self.factor(upper)
        generator = torch.Generator().manual_seed(0)
        vector = [torch.randn(len(d), generator=generator, dtype=d.dtype).to(d) for d in self.diagonal]
        lower, share = 0.0, 0.05
        while True:
            for _ in range(6):
                vector = _normalised(_solve(factor, vector))
            lower = max(lower, sum(float(v @ w) for v, w in zip(vector, self.matvec(vector), strict=True)))
            trial = lower + max(share * (upper - lower), 0.9 * rtol * lower)
            if trial < upper:
                better = self.factor(trial)
                upper, factor = (upper, factor) if better is None else (trial, better)
                share = 0.05 if better is not None else min(0.5, 2 * share)
            if upper <= lower * (1 + rtol):
                return upper, torch.cat(vector)


def _solve(factor: Factor, right: list[Tensor]) -> list[Tensor]:
    """(c·I − A)⁻¹ v, forward and back through the block Cholesky factor."""
    if len(factor) == 1:
        return [torch.cholesky_solve(right[0][:, None], factor[0][0])[:, 0]]
    y: list[Tensor] = []
    for (lower, left), v in zip(factor, right, strict=True):
        v = v if left is None else v - left @ y[-1]
        y.append(torch.linalg.solve_triangular(lower, v[:, None], upper=False)[:, 0])
    x: list[Tensor] = []
    for block in reversed(range(len(factor))):
        v = y[block]
        if block + 1 < len(factor):
            left = factor[block + 1][1]
            v = v - left.mT @ x[-1]  # type: ignore[union-attr]
        x.append(torch.linalg.solve_triangular(factor[block][0].mT, v[:, None], upper=True)[:, 0])
    return x[::-1]


def _normalised(blocks: list[Tensor]) -> list[Tensor]:
    norm = math.sqrt(sum(float(v @ v) for v in blocks))
    return [v / norm for v in blocks]


def _by_output(outputs: int, inputs: int, axes: Sequence[Axis]) -> bool:
    return outputs * math.prod(a.size[1] for a in axes) <= inputs * math.prod(a.size[0] for a in axes)


def _width(pairs: Iterable[tuple[int, int]]) -> int:
    return max(1, max((j - i for j, i in pairs), default=1))


def _plan(geometry: ConvGeometry) -> tuple[int, int, int]:
    """Slices along the first axis, slices a block, and the size of a slice."""
    axes = geometry.axes
    outputs, inputs = geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1]
    by_output = _by_output(outputs, inputs, axes)
    size = (outputs if by_output else inputs) * math.prod(a.size[by_output] for a in axes[1:])
    return axes[0].size[by_output], _width(_couplings(axes[0], by_output)), size


@lru_cache(maxsize=256)
def _couplings(axis: Axis, by_output: bool) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each pair of slices (j ≥ i) of A, the pairs of taps whose products add up to that block."""
    meetings: dict[int, list[tuple[int, int]]] = defaultdict(list)  # what is summed over -> (slice, tap)
    for i in range(axis.size[1]):
        for tap, source in enumerate(axis.reads(i)):
            if source is not None:
                over, kept = (source, i) if by_output else (i, source)
                meetings[over].append((kept, tap))
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for members in meetings.values():
        for j, tap_j in members:
            for i, tap_i in members:
                if j >= i:
                    pairs[j, i].append((tap_j, tap_i))
    return pairs


def _assemble(
    pairs: dict[tuple[int, int], list[tuple[int, int]]], products: list[list[Tensor]], count: int, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    size = len(products[0][0])
    starts = range(0, count, width)
    lengths = [min(width, count - s) for s in starts]
    zeros = products[0][0].new_zeros
    diagonal = [zeros(n, size, n, size) for n in lengths]
    below = [zeros(b, size, a, size) for a, b in pairwise(lengths)]
    for (j, i), taps in pairs.items():
        block = sum((products[p][q] for p, q in taps), start=zeros(size, size))
        if j // width == i // width:
            diagonal[i // width][j % width, :, i % width] = block
            diagonal[i // width][i % width, :, j % width] = block.mT
        else:
            below[i // width][j % width, :, i % width] = block
    square = [d.reshape(len(d) * size, -1) for d in diagonal]
    return square, [e.reshape(len(e) * size, -1) for e in below]
