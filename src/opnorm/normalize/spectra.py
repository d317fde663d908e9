"""‖θ̂(ω)‖ at all frequencies of a grid, for convolutions of few channels, by squarings alone."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from opnorm.normalize.screening import Grids
from opnorm.norms.gram import smaller_gram
from opnorm.norms.spectrum import phase_angles

SQUARINGS = 8  # leave 0.3 % for 32 rows
FIRST_SQUARINGS = 2  # leave 25 % for 32 rows
EVERY = 3  # squarings without a division leave a matrix of norm 1 and 32 rows above 1e-6
FINALISTS = 24  # frequencies that are squared on in any case


def largest_response(weights: Tensor, grids: Grids, look: bool) -> Tensor:
    """min over phases of max over points of ‖θ̂‖, the largest of the groups, rounded up.

    Args:
        weights: (groups, outputs, inputs, *kernel) in double precision.
        grids: the frequencies.
        look: whether values may decide which frequencies are worth more squarings.
    """
    waves, shifts, phases = _waves(grids, weights.device)
    outputs, inputs = weights.shape[1:3]
    shifted = weights.flatten(3).permute(0, 3, 1, 2)[..., None] * shifts[:, None, None]
    response = (waves @ shifted.flatten(2)).view(len(weights), len(waves), outputs, inputs * shifts.shape[1])
    gram = smaller_gram(response).flatten(0, 1)  # one matrix for each group and frequency
    terms = weights[0, 0, 0].numel() + max(response.shape[-2:])
    margin = 1 + 32 * gram.shape[-1] * (gram.shape[-1] + terms) * torch.finfo(weights.dtype).eps
    if look and phases == 1:
        log = _largest(gram)
    else:
        log = _squared(gram, 0, SQUARINGS)[1].view(len(weights), phases, -1).amax(2).amin(1).amax()
    return math.prod(g.factor for g in grids) * (log.exp() * margin).sqrt()


def _largest(gram: Tensor) -> Tensor:
    """The largest of the bounds: only matrices whose first bound is among the largest are squared to the end."""
    gram, first = _squared(gram, 0, FIRST_SQUARINGS)
    top = first.topk(min(FINALISTS, len(first))).indices
    best = _squared(gram[top], FIRST_SQUARINGS + 1, SQUARINGS, first[top])[1].amax()
    left = (first.index_fill(0, top, -math.inf) > best).nonzero().flatten()
    if not len(left):
        return best
    return torch.maximum(best, _squared(gram[left], FIRST_SQUARINGS + 1, SQUARINGS, first[left])[1].amax())


def _squared(gram: Tensor, first: int, last: int, log: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """H^{2^p}/‖·‖_F and log ‖H^{2^p}‖_F^{1/2^p} ≥ log λ_max for p = `last`, from the same for p = `first` - 1."""
    for p in range(first, last + 1):
        if p:
            gram = gram @ gram
        if p % EVERY and p != last:
            continue
        size = torch.linalg.vector_norm(torch.view_as_real(gram).flatten(1), dim=1)
        log = size.log() / 2**p + log
        gram = gram / torch.where(size > 0, size, 1.0)[:, None, None]
    return gram, torch.as_tensor(log)


@cache
def _waves(grids: Grids, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """(phases · points, taps) at the first alias of each frequency, (taps, aliases) to the others, and how many phases.

    Apart, since their product, the waves of `alias_matrix`, takes as many times the memory as there are aliases.
    """
    steps = torch.tensor([g.step for g in grids], dtype=torch.float64)
    ranges = [torch.arange(g.kernel, dtype=torch.float64) for g in grids]
    taps = torch.cartesian_prod(*ranges).view(-1, len(grids)) / steps
    angles = phase_angles(grids)  # (phases, points, dim)
    others = torch.cartesian_prod(*(torch.arange(g.step, dtype=torch.float64) for g in grids)).view(-1, len(grids))
    first, shifts = angles.flatten(0, 1) @ taps.T, 2 * math.pi * taps @ others.T
    one = torch.ones((), dtype=torch.float64)
    waves, size = torch.polar(one, first), 1 / steps.prod().sqrt()
    return waves.to(device), torch.polar(size, shifts).to(device), len(angles)
