"""Small inputs: the largest of many channels exactly, or nearly, at about the cost of the bound of all (DESIGN 1.6)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from opnorm.bound import rounded_up
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.embedding import AxisGrid
from opnorm.norms.exact import group_size, spectral_norms
from opnorm.norms.gram import smaller_gram
from opnorm.norms.groups import dense_groups, gram_matrices, group_shape, without_copies

LARGEST = 400  # rows of the largest dense matrix that is evaluated at all
TINY = 16  # rows up to which the eigenvalues of several matrices take no longer than those of one
EIGENVALUES = 128  # rows up to which eigenvalues are cheap
STEPS, MOST = 12, 4  # of the Lanczos iteration between two factorisations, and how many of these to try
LOOSE = 2e-3  # of λ_max, by which a factorisation has to succeed
LESS = 1 - 1e-6  # of the largest norm: what others are proved to have at most, so that float32 tells them apart
PROVED = 1 + 1e-10  # what eigenvalues and factorisations of up to `LARGEST` rows may be off by, with room to spare
ENOUGH = {EIGENVALUES: 0.008, 256: 0.016, LARGEST: 0.02}  # rows of the matrix, and what its norm has to save at least


def worth_refining(geometry: ConvGeometry, grids: Sequence[AxisGrid]) -> int:
    """How many channels to evaluate where that saves enough: 0.8 %, more where it takes longer, as in `ENOUGH`.

    The bound of a Gaussian kernel is too large by about Σ (n/M)²/5, n the degree of its response and M the grid, and
    that of a trained one by about half as much.
    """
    if not geometry.has_size or geometry.is_matrix or (size := group_size(geometry)) > max(ENOUGH):
        return 0
    looseness = sum((g.degree / g.points) ** 2 for g in grids if not g.exact) / 5
    enough = next(saved for rows, saved in ENOUGH.items() if size <= rows)
    if looseness < enough and all(g.factor < 1.01 for g in grids):
        return 0
    return 1 if size > EIGENVALUES else max(4, 2**21 // size**3)


def refine(weights: Tensor, axes: Sequence[Axis], bounds: Tensor, count: int) -> Tensor:
    """The bounds of all groups, of which up to `count` of the largest have been replaced by norms, or nearly.

    On a GPU all of these at once, so that nothing waits for a result. On a CPU the largest; then 8 more, 64 more, ...,
    of those whose bound exceeds the norms so far, most of which are proved to have less. Tiny ones: 8, then the rest.
    """
    weights, axes = without_copies(weights, axes)
    order = bounds.topk(min(count, len(bounds))).indices
    if bounds.is_cuda:
        return _lowered(bounds, order, spectral_norms(dense_groups(weights[order].double(), axes)))
    tiny = min(group_shape(weights, axes)) <= TINY
    best, start, size = bounds.new_zeros(()), 0, 8 if tiny else 1
    while start < len(order):
        some = order[start : start + size]
        some = some[bounds[some] > best]
        if not len(some):
            break
        norms = _norms(_grams(weights[some].double(), axes), best.double(), bounds[some].double())
        bounds = _lowered(bounds, some, norms)
        best = torch.maximum(best, bounds[some].amax())
        start, size = start + size, count if tiny else 8 * size
    return bounds


def _lowered(bounds: Tensor, some: Tensor, norms: Tensor) -> Tensor:
    return bounds.scatter(0, some, torch.minimum(rounded_up(norms, bounds.dtype), bounds[some]))


def _grams(weights: Tensor, axes: Sequence[Axis]) -> Tensor:
    large = min(group_shape(weights, axes)) > EIGENVALUES
    return gram_matrices(weights, axes) if large else smaller_gram(dense_groups(weights, axes))


def _norms(grams: Tensor, best: Tensor, bounds: Tensor) -> Tensor:
    """√λ_max of each, or nearly; `LESS` than `best` of those that are proved to have no more than that."""
    if best > 0:
        norms = (best * (LESS * PROVED)).repeat(len(grams))
        above = _may_exceed(grams, LESS * float(best))
        if above.any():
            norms[above] = _norms(grams[above], torch.zeros_like(best), bounds[above])
        return norms
    if grams.shape[-1] > EIGENVALUES:
        return torch.stack([*map(_proved, grams, bounds)])
    return torch.linalg.eigvalsh(grams)[:, -1].clamp(min=0).sqrt() * PROVED


def _may_exceed(grams: Tensor, norm: float) -> Tensor:
    """False where λ_max ≤ norm² is proved: by (Σ λ⁴)^¼ where matrices are tiny, else by a factorisation."""
    if grams.shape[-1] <= TINY:
        return torch.linalg.matrix_norm(grams @ grams) > norm**4
    return torch.linalg.cholesky_ex(_shifted(grams, norm**2)).info != 0


def _proved(gram: Tensor, bound: Tensor) -> Tensor:
    """√λ_max or at most 0.1 % more, or `bound`: a value from below, and a factorisation that proves it from above."""
    for value in islice(_rising(gram), MOST):
        shift = value * (1 + LOOSE)
        if not shift < float(bound) ** 2:
            break
        if not torch.linalg.cholesky_ex(_shifted(gram, shift)).info:
            return gram.new_tensor(math.sqrt(shift) * PROVED)
    return bound


def _rising(gram: Tensor) -> Iterator[float]:
    """Values that rise to λ_max: the largest eigenvalue of the Lanczos matrix, after every `STEPS` steps."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(gram), generator=generator, dtype=gram.dtype).to(gram)
    vector /= vector.norm()
    before, beta = torch.zeros_like(vector), vector.new_zeros(())
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    while True:
        for _ in range(STEPS):
            image = torch.addmv(before, gram, vector, beta=-1)
            alpha = vector @ image
            image -= alpha * vector
            beta = image.norm()
            before, vector = beta * vector, image / beta.clamp(min=1e-300)
            diagonal.append(alpha)
            beside.append(beta)
        matrix = torch.diag(torch.stack(diagonal)) + torch.diag(torch.stack(beside[:-1]), -1)  # its lower half
        yield float(torch.linalg.eigvalsh(matrix)[-1])


def _shifted(grams: Tensor, shift: float) -> Tensor:
    """shift·I − A."""
    matrices = -grams
    matrices.diagonal(dim1=-2, dim2=-1).add_(shift)
    return matrices
