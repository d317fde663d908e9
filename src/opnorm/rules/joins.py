"""Sums, joins and maxima of values: the triangle inequality, and where branches share more than that.

L(A + B) ≤ L(A) + L(B) and L([A; B]) ≤ √(L(A)² + L(B)²) hold always. Branches that are linear in one value are one
linear map of it; branches that each see their own part of a value share its bound; max and min of the same values
sort them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opnorm.rules.expression import Apply, Concat, Extremum, Sum, Value
from opnorm.rules.factors import Diagonal, Elementwise, Factor, Relabel, product, up
from opnorm.rules.merge import SLACK, Taps, add, hoist_permutations, spelled_out
from opnorm.rules.steps import LONGEST, Bound, Share, Step, Union, disjoint, extremum_of, merged

if TYPE_CHECKING:
    from opnorm.rules.composition import Composer


def of_sum(c: Composer, value: Sum) -> Bound:
    """Σ L_i, or less."""
    bounds = [c.bound(v).value for v in value.operands]
    if value.disjoint:
        plain = _joined(c, value, _joint(bounds, c.ord), f"{_root(c.ord)} of " + _listed(bounds), value.operands)
    else:
        total = up(sum(bounds) * (1 + len(bounds) * 2.0**-52))
        plain = _joined(c, value, total, "sum of " + _listed(bounds), value.operands)
    if not c.merge:
        return plain
    slices = _over_slices(c, value, _total[float(c.ord)])
    return min([plain, *slices, *_linear(c, value, plain.value, lambda taps, _: add(taps))], key=lambda b: b.value)


def of_concat(c: Composer, value: Concat) -> Bound:
    """√(Σ L_i²), or less."""
    bounds = [c.bound(v).value for v in value.operands]
    plain = _joined(c, value, _joint(bounds, c.ord), f"{_root(c.ord)} of " + _listed(bounds), value.operands)
    if not c.merge:
        return plain
    paired = _paired(c, value)
    return min(
        [plain, *paired, *_over_slices(c, value, max), *_linear(c, value, plain.value, _stacked(c, value))],
        key=lambda b: b.value,
    )


def of_extremum(c: Composer, value: Extremum) -> Bound:
    """√(Σ L_i²), or less: |max(a, b) - max(a', b')| ≤ max(|a - a'|, |b - b'|), entry by entry."""
    bounds = [c.bound(v).value for v in value.operands]
    plain = _joined(c, value, _joint(bounds, c.ord), f"{_root(c.ord)} of " + _listed(bounds), value.operands)
    if not c.merge:
        return plain
    return min([plain, *_over_slices(c, value, max), *_same_entries(c, value)], key=lambda b: b.value)


def _joined(
    c: Composer, value: Value, total: float, note: str, parents: Sequence[Value], best: float | None = None
) -> Bound:
    most = max((c.bound(v).value for v in parents), default=0.0)
    share = total / most if most else 0.0
    plain = share if best is None else best / most if most else 0.0
    saving = max(0.0, 1 - share / plain) if plain else 0.0
    row = Share(value.where, None, value.shape, plain, share, "upper", "triangle inequality", note, total, saving)
    return Bound(total, (row,), tuple(parents))


def _over_slices(c: Composer, value: Sum | Concat | Extremum, join: Callable[[Sequence[float]], float]) -> list[Bound]:
    """Branches that each see their own part of one value share its bound instead of paying for it each."""
    found = [f for v in value.operands if (f := _from_slice(c, v)) is not None]
    if len(found) < len(value.operands):
        return []
    origins, ranges, constants = zip(*found, strict=True)
    if any(o is not origins[0] for o in origins) or not disjoint(ranges):
        return []
    base = c.bound(origins[0]).value
    note = f"branches on separate parts of one value: {_listed(constants)} times {base:.4g}"
    total = up(join(constants) * base * (1 + len(constants) * 2.0**-52))
    row = _joined(c, value, total, note, value.operands, _joint([c * base for c in constants], c.ord))
    return [row]


def _from_slice(c: Composer, value: Value) -> tuple[Value, tuple[int, int, int], float] | None:
    steps: list[Step] = []
    while isinstance(value, Apply):
        taken = value.factor.taken if isinstance(value.factor, Relabel) else None
        if taken is not None:
            steps.reverse()
            return value.operand, taken, min(c.weigh(p).value for p in c.plans(steps)) if steps else 1.0
        steps.append(c.step(value))
        value = value.operand
    return None


def _paired(c: Composer, value: Concat) -> list[Bound]:
    """[max(a, b); min(a, b)] is a sorting of [a; b]: of norm 1."""
    pieces = value.operands
    if len(pieces) != 2:
        return []
    first, second = pieces
    if isinstance(first, Extremum) and isinstance(second, Extremum):
        if first.kind != second.kind and set(first.operands) == set(second.operands):
            joint = Concat(value.shape, value.where, first.operands, value.dim)
            return [_joined(c, value, c.bound(joint).value, "a sorting of two values", pieces)]
        return []
    sources = [extremum_of(p) for p in pieces]
    if sources[0] is None or sources[1] is None or sources[0][0] is not sources[1][0]:
        return []
    (kind, *dims), (other, *others) = sources[0][1], sources[1][1]
    if {kind, other} != {"max", "min"} or dims != others:
        return []
    return [_joined(c, value, c.bound(sources[0][0]).value, "a sorting", pieces)]


def _same_entries(c: Composer, value: Extremum) -> list[Bound]:
    """max(f(x), g(x)) of entries of one value: the larger of the two slopes."""
    ends = []
    for v in value.operands:
        constant = 1.0
        while isinstance(v, Apply) and isinstance(v.factor, (Elementwise, Diagonal)):
            constant, v = up(constant * v.factor.alone(c.ord).value), v.operand
        ends.append((v, constant))
    # a common value may lie before the end of one of the chains: only the plain case is looked for
    if any(v is not ends[0][0] for v, _ in ends):
        return []
    return [
        _joined(
            c,
            value,
            up(max(c for _, c in ends) * c.bound(ends[0][0]).value),
            "the larger of two slopes",
            (ends[0][0],),
        )
    ]


# linear maps of one value, added or joined


def _linear(
    c: Composer, value: Sum | Concat, plain: float, unite: Callable[[list[Taps], list[Value]], Taps | None]
) -> list[Bound]:
    """Branches that are linear in one value, such as I + A, as one linear map of it."""
    trails = [_trail(c, v) for v in value.operands]
    common = next((v for v, _ in trails[0] if all(any(v is u for u, _ in t) for t in trails[1:])), None)
    if common is None:
        return []
    chains = [next(steps for v, steps in t if v is common) for t in trails]
    factor = _united(c, chains, common, value, unite)
    if factor is None:
        return []
    replacement = Apply(value.shape, value.where, factor, common)
    bound = c.bound(replacement)
    if not bound.value < plain:
        return []
    inner = tuple(dict.fromkeys(leaf for steps in chains for step in steps for leaf in step.leaves))
    c.united[factor] = Union(inner, plain / c.bound(common).value)
    c.rewritten[value] = replacement
    del c.bounds[replacement]
    return [c.bound(replacement)]


def _trail(c: Composer, value: Value) -> list[tuple[Value, list[Step]]]:
    """All values that this one is a linear map of, nearest first, with that map."""
    steps: list[Step] = []
    trail = [(value, list(steps))]
    while True:
        value = c.rewritten.get(value, value)
        if not isinstance(value, Apply) or not value.factor.linear or len(steps) > LONGEST:
            return trail
        steps.insert(0, c.step(value))
        value = value.operand
        trail.append((value, list(steps)))


def _united(
    c: Composer, chains: list[list[Step]], common: Value, value: Sum | Concat, unite: Callable
) -> Factor | None:
    plain = sum(product(c.weigher.alone(s.factor).value for s in steps) for steps in chains)
    dim = value.dim if isinstance(value, Concat) else None
    spelled = spelled_out([[s.factor for s in steps] for steps in chains], common.shape, value.shape, plain, dim)
    if spelled is not None:
        return spelled
    taps: list[Taps] = []
    for steps in chains:
        moved, _ = hoist_permutations([s.factor for s in steps], common.ndim)
        one = merged(moved, common.shape)
        if one is None:
            return None
        taps.append(one)
    joint = unite(taps, list(value.operands))
    return joint.factor(SLACK * plain) if joint is not None and c.worth(joint) else None


def _stacked(c: Composer, value: Concat) -> Callable[[list[Taps], list[Value]], Taps | None]:
    def unite(taps: list[Taps], operands: list[Value]) -> Taps | None:
        if value.dim != 1 or value.shape[1] is None:
            return None
        rows, placed, start = value.shape[1], [], 0
        for t in taps:
            t = t.dense()
            weight = t.weight.new_zeros(rows, *t.weight.shape[1:])
            weight[start : start + t.weight.shape[0]] = t.weight
            start += t.weight.shape[0]
            placed.append(replace(t, weight=weight))
        return add(placed)

    return unite


_total: dict[float, Callable[[Sequence[float]], float]] = {
    1.0: max,
    2.0: lambda c: math.sqrt(sum(x * x for x in c)),
    math.inf: sum,
}


def _joint(bounds: Sequence[float], ord: float) -> float:
    """The bound of values side by side: the root of the sum of squares, or the sum, or the largest."""
    if ord == 1:
        return up(sum(bounds) * (1 + len(bounds) * 2.0**-52))
    if ord == math.inf:
        return max(bounds)
    return up(math.hypot(*bounds) * (1 + len(bounds) * 2.0**-52))


def _root(ord: float) -> str:
    return {1.0: "sum", math.inf: "largest"}.get(float(ord), "root of squares")


def _listed(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{n:.4g}" for n in numbers[:4])
    return shown + (f", … ({len(numbers)} of them)" if len(numbers) > 4 else "")


JOINS: dict[type, Callable[[Any, Any], Bound]] = {Sum: of_sum, Concat: of_concat, Extremum: of_extremum}
