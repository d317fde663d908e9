"""A chain of factors, tighter than the product of their norms: constants of channels folded into their neighbours.

Between two maps that mix channels, B and A, lies a run of local maps with constants d_j. For any split d_j = p_j·q_j,
‖B∘D∘A‖ ≤ ‖B·diag(p)‖·‖diag(q)·A‖. A few splits are tried at every run, and the best product is found by going along the
chain once (the choice at one run touches only the two maps beside it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor

from opnorm.rules.factors import Diagonal, Factor, Local, Measured, Mixing, Relabel, largest, product, up

Run = Sequence[Local | Relabel]
CHEAP = 3e8  # multiplications of a norm up to which all splits are tried


@dataclass(frozen=True)
class Split:
    """One way to share out the constants of a run: `back` to the map before it, `ahead` to the one after."""

    name: str
    back: Tensor | None
    ahead: Tensor | None
    constant: float


@dataclass
class Chain:
    """The best bound of a chain found, and what each factor has in it.

    Attributes:
        value: the bound.
        shares: for each factor the number that it contributes; their product is `value`.
        measured: how these numbers were found.
        folded: for each factor the indices of the factors that its constants went into.
    """

    value: float
    shares: list[float]
    measured: list[Measured]
    folded: list[tuple[int, ...]]


@dataclass
class Weigher:
    """Bounds chains in one norm, and remembers what it has measured."""

    ord: float
    _known: dict[tuple[Factor, bytes, bytes], Measured] = field(default_factory=dict)

    def alone(self, factor: Factor) -> Measured:
        """The constant of a factor by itself."""
        return self.measure(factor, None, None)

    def measure(self, factor: Factor, left: Tensor | None, right: Tensor | None) -> Measured:
        """‖diag(left)·F·diag(right)‖, measured once."""
        key = (factor, _key(left), _key(right))
        if key not in self._known:
            self._known[key] = self._measure(factor, left, right)
        return self._known[key]

    def _measure(self, factor: Factor, left: Tensor | None, right: Tensor | None) -> Measured:
        if isinstance(factor, Mixing) and (left is not None or right is not None):
            return factor.measure(self.ord, left, right)
        if left is None and right is None:
            return factor.alone(self.ord)
        alone = self.alone(factor)
        return replace(alone, value=product((alone.value, largest(left), largest(right))))

    def product(self, factors: Sequence[Factor]) -> Chain:
        """The plain product."""
        measured = [self.alone(f) for f in factors]
        return Chain(product(m.value for m in measured), [m.value for m in measured], measured, [()] * len(factors))

    def best(self, factors: Sequence[Factor]) -> Chain:
        """The smallest product over the splits that are tried."""
        breaks = [i for i, f in enumerate(factors) if not isinstance(f, (Local, Relabel))]
        bounds = [-1, *breaks, len(factors)]
        runs = [[f for f in factors[a + 1 : b] if isinstance(f, (Local, Relabel))] for a, b in pairwise(bounds)]
        splits = [self._splits(run, i == 0, i == len(breaks)) for i, run in enumerate(runs)]
        for i, b in enumerate(breaks):
            factor = factors[b]
            if not isinstance(factor, Mixing) or factor.effort > CHEAP:
                splits[i], splits[i + 1] = _natural(splits[i]), _natural(splits[i + 1])
        best: list[tuple[float, tuple[Split, ...]]] = [(_end(s.constant, s.back), (s,)) for s in splits[0]]
        for b, options in zip(breaks, splits[1:], strict=True):
            best = [
                min(
                    (
                        (value * self.measure(factors[b], s.back, path[-1].ahead).value * s.constant, (*path, s))
                        for value, path in best
                    ),
                    key=lambda pair: pair[0],
                )
                for s in options
            ]
        _, path = min(best, key=lambda pair: _end(pair[0], pair[1][-1].ahead))
        return self._account(factors, runs, breaks, path)

    def _splits(self, run: Run, first: bool, last: bool) -> list[Split]:
        """The splits to try for a run; nothing goes back where nothing is before it, or ahead where nothing follows."""
        scales = [f.scales(self.ord) if isinstance(f, Local) else None for f in run]
        constant = math.prod(
            float(s) if s is not None and s.numel() == 1 else 1.0 if s is not None else f.alone(self.ord).value
            for f, s in zip(run, scales, strict=True)
        )
        shared = [s if s is not None and s.numel() > 1 else None for s in scales]
        if not any(s is not None for s in shared):
            return [Split("natural", None, None, up(constant))]
        reach = next((i for i, f in enumerate(run) if isinstance(f, Relabel) and f.dims is None), len(run))
        diagonal = next((i for i, f in enumerate(run) if not isinstance(f, Diagonal)), len(run))
        plans = {"natural": [float(i < diagonal) for i in range(len(run))], "ahead": [0.0] * len(run)}
        if reach:
            plans["back"] = [float(i < reach) for i in range(len(run))]
            plans["half"] = [0.5 * (i < reach) for i in range(len(run))]
        if first:
            plans = {"natural": plans["ahead"]}
        results = []
        for name, powers in plans.items():
            ahead, lost = _ahead(
                run, [None if s is None else s ** (1 - p) for s, p in zip(shared, powers, strict=True)]
            )
            back = (
                None
                if first
                else _back(run, [None if s is None or not p else s**p for s, p in zip(shared, powers, strict=True)])
            )
            if last and ahead is not None:
                lost, ahead = lost * float(ahead.amax()), None
            results.append(Split(name, back, ahead, up(constant * lost)))
        return results

    def _is_number(self, factor: Factor) -> bool:
        return not isinstance(factor, Local) or factor.scales(self.ord).numel() == 1

    def _account(
        self, factors: Sequence[Factor], runs: Sequence[Run], breaks: list[int], path: tuple[Split, ...]
    ) -> Chain:
        shares, position = [1.0] * len(factors), 0
        folded: list[tuple[int, ...]] = [() for _ in factors]
        measured = [Measured(1.0) if isinstance(f, Mixing) else self.alone(f) for f in factors]
        for i, (run, split) in enumerate(zip(runs, path, strict=True)):
            targets = tuple(
                b for b, w in ((position - 1, split.back), (position + len(run), split.ahead)) if w is not None
            )
            total = 1.0
            for j, f in enumerate(run):
                if self._is_number(f):
                    shares[position + j] = measured[position + j].value
                    total *= measured[position + j].value
                else:
                    folded[position + j] = targets
            if run and total > 0:  # what was not folded anywhere, and roundings, stay with the last of the run
                rest = split.constant / total
                several = [j for j, f in enumerate(run) if not self._is_number(f)]
                shares[position + (several[-1] if several else len(run) - 1)] *= rest
            elif run:
                shares[position + len(run) - 1] = split.constant
            position += len(run)
            if i < len(breaks):
                m = self.measure(factors[breaks[i]], path[i + 1].back, split.ahead)
                measured[breaks[i]], shares[breaks[i]] = m, m.value
                position += 1
        return Chain(product(shares), shares, measured, folded)


def _natural(options: list[Split]) -> list[Split]:
    return [s for s in options if s.name == "natural"]


def _ahead(run: Run, scales: Sequence[Tensor | None]) -> tuple[Tensor | None, float]:
    """Constants carried to the end of a run, and a number for what could not be."""
    weights, lost = None, 1.0
    for factor, scale in zip(run, scales, strict=True):
        if weights is not None:
            carried = factor.carry(weights)
            if carried is None or carried.numel() == 1:
                lost, carried = lost * float(weights.amax()), None
            weights = carried
        if scale is not None:
            weights = scale if weights is None else weights * scale
    return weights, lost


def _back(run: Run, scales: Sequence[Tensor | None]) -> Tensor | None:
    """Constants carried to the beginning of a run."""
    weights = None
    for factor, scale in reversed(list(zip(run, scales, strict=True))):
        if weights is not None:
            weights = factor.carry_back(weights) if isinstance(factor, Relabel) else factor.carry(weights)
        if scale is not None:
            weights = scale if weights is None else weights * scale
    return weights


def _end(value: float, weights: Tensor | None) -> float:
    return value * largest(weights)


def _key(weights: Tensor | None) -> bytes:
    return (
        b""
        if weights is None
        else bytes(str(tuple(weights.shape)), "ascii") + weights.contiguous().numpy(force=True).tobytes()
    )
