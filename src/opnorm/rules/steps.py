"""Chains as steps, what each step has in a bound, and what is asked about values on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from opnorm.rules.expression import Apply, Concat, Extremum, Sum, Value, Where
from opnorm.rules.factors import Blockwise, Depthwise, Diagonal, Elementwise, Factor, Matrix, Mixing, Relabel, Shape
from opnorm.rules.merge import Spelled, Taps, compose, taps_of

LONGEST = 128  # factors that are looked at together


@dataclass(frozen=True)
class Union:
    """What a sum or join of linear branches was before it became one map: the branches, and the plain bound of it."""

    inner: tuple[Step, ...]
    plain: float


@dataclass(frozen=True)
class Step:
    """One factor of a chain: where it is, the shapes before and after it, and which steps it stands for if merged."""

    factor: Factor
    where: Where
    shape: Shape
    out: Shape
    members: tuple[Step, ...] = ()
    union: Union | None = None
    plain: float | None = None
    inside: bool = False

    @property
    def leaves(self) -> tuple[Step, ...]:
        """The operations of the network that this step stands for."""
        if self.union is not None:
            inner = (replace(leaf, inside=True) for leaf in self.union.inner)
            return (*inner, replace(self, union=None, plain=self.union.plain))
        return self.members or (self,)


@dataclass(frozen=True)
class Share:
    """What one operation has in the bound: its own constant, and the number that it contributes after all merging."""

    where: Where
    factor: Factor | None
    shape: Shape
    alone: float
    value: float
    guarantee: str
    method: str
    note: str
    total: float
    saving: float = 0.0


@dataclass(frozen=True)
class Bound:
    """L with ‖v(x) - v(y)‖ ≤ L‖x - y‖, the shares of the operations since `parents`, which have bounds of their own."""

    value: float
    shares: tuple[Share, ...] = ()
    parents: tuple[Value, ...] = ()


def hubs(output: Value) -> list[Value]:
    """All values, operands before what is made of them; only those that begin or end a chain."""
    order: list[Value] = []
    seen: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(output, False)]
    while stack:
        value, ready = stack.pop()
        if ready:
            order.append(value)
            continue
        if value in seen:
            continue
        seen.add(value)
        keep = value
        length = 0
        while isinstance(value, Apply):
            value, length = value.operand, length + 1
            if length % LONGEST == 0:
                break
        stack.append((keep, True))
        if isinstance(value, (Sum, Concat, Extremum)) and value is keep:
            stack.extend((v, False) for v in value.operands)
        elif value is not keep:
            stack.append((value, False))
    return order


def linear_runs(steps: list[Step]) -> list[tuple[int, int]]:
    """Ranges of at least two linear factors of which at least two are more than a diagonal."""
    runs, start = [], 0
    for i in range(len(steps) + 1):
        if i < len(steps) and steps[i].factor.linear:
            continue
        heavy = [s for s in steps[start:i] if isinstance(s.factor, (Mixing, Depthwise, Blockwise, Spelled))]
        if len(heavy) > 1:
            runs.append((start, i))
        start = i + 1
    return runs


def merged(factors: Sequence[Factor], shape: Shape) -> Taps | None:
    """A chain of linear factors as one convolution; the identity where there are none."""
    dim = len(shape) - 2
    if dim < 0 or shape[1] is None:
        return None
    result: Taps | None = taps_of(
        Diagonal(torch.ones((), dtype=torch.float64).reshape((1,) * len(shape)), len(shape)), shape
    )
    for factor in factors:
        taps = taps_of(factor, after_taps(result, shape) if result is not None else shape)
        result = compose(taps, result) if taps is not None and result is not None else None
        if result is None:
            return None
    return result


def after_taps(taps: Taps, shape: Shape) -> Shape:
    """The shape behind a convolution."""
    sizes = tuple(
        None if n is None else (n + a + b - k) // s + 1
        for n, a, b, k, s in zip(taps.size, taps.before, taps.after, taps.kernel, taps.stride, strict=True)
    )
    return (shape[0], taps.weight.shape[0], *sizes)


def replaced(steps: list[Step], factors: list[Factor], origin: list[int], shape: Shape) -> list[Step]:
    """Steps for factors that were moved past permutations; shapes are followed through."""
    result = []
    for factor, index in zip(factors, origin, strict=True):
        step = steps[index]
        after = shape_after(factor, shape, step.out)
        result.append(Step(factor, step.where, shape, after))
        shape = after
    return result


def shape_after(factor: Factor, shape: Shape, out: Shape) -> Shape:
    """The shape behind a factor that was moved past a permutation."""
    if isinstance(factor, (Elementwise, Diagonal)):
        return shape
    if isinstance(factor, Matrix):
        return (*shape[: factor.axis], factor.matrix.shape[0], *shape[factor.axis + 1 :])
    if isinstance(factor, Relabel) and factor.dims is not None:
        return tuple(shape[d] for d in factor.dims)
    return out  # what does not commute with permutations is where it was, behind the pending one


def disjoint(ranges: Sequence[tuple[int, int, int]]) -> bool:
    """Whether slices (dimension, start, stop) share nothing."""
    if len({r[0] for r in ranges}) > 1:
        return False
    spans = sorted((start, stop) for _, start, stop in ranges)
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def extremum_of(value: Value) -> tuple[Value, tuple] | None:
    """(x, ("max", dim)) where a value is the largest of x along a dimension."""
    while isinstance(value, Apply):
        if isinstance(value.factor, Blockwise) and value.factor.extremum is not None:
            return value.operand, value.factor.extremum
        if not isinstance(value.factor, Relabel) or value.factor.multiplicity != 1:
            return None
        value = value.operand
    return None
