"""From values to a bound of the whole network: chains, and the linear maps in them merged where it pays.

L(B∘A) ≤ L(B)·L(A) is where it starts. Everything else here is another upper bound of the same thing, and the smallest
is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from opnorm.rules.expression import Apply, Constant, Source, Sum, Value
from opnorm.rules.factors import (
    Convolution,
    Depthwise,
    Factor,
    Mixing,
    Shape,
    product,
    up,
)
from opnorm.rules.joins import JOINS
from opnorm.rules.merge import SLACK, Taps, compose, hoist_permutations, spelled_out, taps_of
from opnorm.rules.steps import (
    LONGEST,
    Bound,
    Share,
    Step,
    Union,
    hubs,
    linear_runs,
    replaced,
)
from opnorm.rules.weights import CHEAP, Chain, Weigher

_MOST_EFFORT = 2e10  # multiplications of the norm of a merged convolution up to which it is worth having
_MOST_TERMS = 8  # of a sum that a linear map is distributed over


@dataclass
class Composer:
    """Bounds values, each once.

    Args:
        ord: the norm.
        merge: whether to look for more than the plain product of all factors.
    """

    ord: float
    merge: bool = True
    weigher: Weigher = None  # type: ignore[assignment]
    bounds: dict[Value, Bound] = field(default_factory=dict)
    rewritten: dict[Value, Value] = field(default_factory=dict)
    united: dict[Factor, Union] = field(default_factory=dict)
    _spread: dict[tuple[Value, tuple[Factor, ...]], Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weigher = self.weigher or Weigher(float(self.ord))

    def solve(self, output: Value) -> Bound:
        """The bound of a value, those of the values that it is made of first, however deep the network."""
        for hub in hubs(output):
            self.bound(hub)
        return self.bound(output)

    def bound(self, value: Value) -> Bound:
        """The smallest upper bound that was found."""
        if value not in self.bounds:
            self.bounds[value] = self._bound(value)
        return self.bounds[value]

    def shares(self, output: Value) -> list[Share]:
        """Everything that the bound of a value is made of, in the order of computation, each operation once."""
        seen: set[Value] = set()
        rows: dict[tuple[str, int], Share] = {}
        stack = [output]
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            bound = self.bound(value)
            for index, share in enumerate(bound.shares):
                same = sum(1 for s in bound.shares[:index] if s.where.node == share.where.node)
                rows.setdefault((share.where.node, same), share)
            stack.extend(bound.parents)
        return list(rows.values())

    def _bound(self, value: Value) -> Bound:
        if isinstance(value, Source):
            return Bound(1.0 if value.known else math.inf)
        if isinstance(value, Constant):
            return Bound(0.0)
        if isinstance(value, Apply):
            return self._chain(value)
        return JOINS[type(value)](self, value)

    # chains

    def _chain(self, value: Apply) -> Bound:
        steps, hub = self._steps(value)
        base = self.bound(hub)
        plans = self.plans(steps) if self.merge else [steps]
        results = [(self.weigh(plan), plan) for plan in plans]
        chain, plan = min(results, key=lambda pair: pair[0].value)
        result = Bound(product((base.value, chain.value)), self._table(plan, chain, base.value), (hub,))
        spread = self._distributed(steps, hub) if self.merge and isinstance(hub, Sum) else None
        return spread if spread is not None and spread.value < result.value else result

    def weigh(self, plan: Sequence[Step]) -> Chain:
        factors = [s.factor for s in plan]
        return self.weigher.best(factors) if self.merge else self.weigher.product(factors)

    def _steps(self, value: Value) -> tuple[list[Step], Value]:
        """The factors from the last sum, join or input to a value, first applied first."""
        steps: list[Step] = []
        while True:
            value = self.rewritten.get(value, value)
            if not isinstance(value, Apply) or (len(steps) >= LONGEST and value in self.bounds):
                break
            steps.append(self.step(value))
            value = value.operand
        steps.reverse()
        if not self.merge:
            return steps, value
        moved, origin = hoist_permutations([s.factor for s in steps], value.ndim)
        if all(f is steps[i].factor for f, i in zip(moved, origin, strict=True)) and len(moved) == len(steps):
            return steps, value
        return replaced(steps, moved, origin, value.shape), value

    def step(self, value: Apply) -> Step:
        """The last factor of a value."""
        return Step(value.factor, value.where, value.operand.shape, value.shape, union=self.united.get(value.factor))

    def plans(self, steps: list[Step]) -> list[list[Step]]:
        """The chain as it is, and with more and more of its linear runs merged."""
        plans = [steps]
        for start, stop in reversed(linear_runs(steps)):
            for part in (self._one_matrix(steps[start:stop]), self._convolutions(steps[start:stop])):
                if part is None:
                    continue
                candidates = [[*p[:start], *part, *p[stop:]] for p in plans[:1] + plans[-1:]]
                best = min([plans[-1], *candidates], key=lambda p: self.weigh(p).value)
                if best is not plans[-1]:
                    plans.append(best)
                    break
        return plans[:1] + plans[-1:]

    def _convolutions(self, steps: list[Step]) -> list[Step] | None:
        """A linear run with neighbours merged into convolutions, from the left, as far as that goes."""
        result: list[Step] = []
        pending: list[Step] = []
        taps: Taps | None = None
        for step in steps:
            own = taps_of(step.factor, step.shape)
            joint = compose(own, taps) if own is not None and taps is not None else None
            if joint is None or not self.worth(joint):
                result += self._flushed(pending, taps)
                pending, taps = [step], own
            else:
                pending, taps = [*pending, step], joint
        result += self._flushed(pending, taps)
        return result if len(result) < len(steps) else None

    def _flushed(self, pending: list[Step], taps: Taps | None) -> list[Step]:
        heavy = [s for s in pending if isinstance(s.factor, (Mixing, Depthwise))]
        if taps is None or len(heavy) < 2:
            return pending
        factor = taps.factor(SLACK * product(self.weigher.alone(s.factor).value for s in pending))
        return [Step(factor, pending[-1].where, pending[0].shape, pending[-1].out, _leaves(pending))]

    def worth(self, taps: Taps) -> bool:
        factor = taps.factor()
        return not isinstance(factor, Mixing) or factor.effort <= _MOST_EFFORT

    def _one_matrix(self, steps: list[Step]) -> list[Step] | None:
        last = steps[-1]
        if self.ord != 2 and sum(isinstance(s.factor, (Mixing, Depthwise)) for s in steps) < 2:
            return None
        plain = product(self.weigher.alone(s.factor).value for s in steps)
        spelled = spelled_out([[s.factor for s in steps]], steps[0].shape, last.out, plain, most=self._most(steps))
        return None if spelled is None else [Step(spelled, last.where, steps[0].shape, last.out, _leaves(steps))]

    def _most(self, steps: Sequence[Step]) -> int:
        """Two spatial kernels in a row are no convolution, and their product is loose: the matrix is worth more."""
        convolutions = [s.factor for s in steps if isinstance(s.factor, (Convolution, Depthwise))]
        wide = sum(math.prod(f.operator.geometry.kernel_size) > 1 for f in convolutions)
        return 3200 if wide > 1 else 1100

    def _table(self, plan: Sequence[Step], chain: Chain, base: float) -> tuple[Share, ...]:
        rows: list[Share] = []
        total = base
        plain = self._plain_shares(plan, chain)
        for i, step in enumerate(plan):
            *inner, own = step.leaves
            rows += [self._row(leaf, 1.0, f"merged with {_label(step)}", total) for leaf in inner]
            total = product((total, chain.shares[i]))
            note = "one linear map with " + _labels(inner) if inner else ""
            if chain.folded[i]:
                note = "folded into " + _labels([plan[j] for j in chain.folded[i]])
            m = chain.measured[i]
            saving = 1 - chain.shares[i] / plain[i] if plain[i] > 0 and not chain.folded[i] else 0.0
            row = self._row(own, chain.shares[i], note, total)
            rows.append(replace(row, guarantee=m.guarantee, method=m.method, saving=max(0.0, saving)))
        return tuple(rows)

    def _plain_shares(self, plan: Sequence[Step], chain: Chain) -> list[float]:
        """What each step would contribute with everything that was merged with it, or folded into it, by itself."""
        alone = [math.prod(self._alone(s) for s in (step.members or (step,)) if not s.inside) for step in plan]
        result = list(alone)
        for i, targets in enumerate(chain.folded):
            for j in targets:
                result[j] *= alone[i] ** (1 / len(targets))
        return result

    def _alone(self, step: Step) -> float:
        if step.plain is not None:
            return step.plain
        return step.union.plain if step.union is not None else self.weigher.alone(step.factor).value

    def _row(self, step: Step, value: float, note: str, total: float) -> Share:
        m = self.weigher.alone(step.factor)
        return Share(step.where, step.factor, step.shape, self._alone(step), value, m.guarantee, m.method, note, total)

    # linear maps over sums

    def _distributed(self, steps: list[Step], hub: Sum) -> Bound | None:
        """B(A₁u₁ + A₂u₂) ≤ ‖BA₁‖L(u₁) + ‖BA₂‖L(u₂), for the linear beginning of a chain."""
        count = next((i for i, s in enumerate(steps) if not s.factor.linear), len(steps))
        prefix = steps[:count]
        heavy = [s.factor for s in prefix if isinstance(s.factor, (Mixing, Depthwise))]
        if not any(isinstance(f, Mixing) for f in heavy) or self._terms(hub) > _MOST_TERMS:
            return None
        if not (_small(hub.shape) or all(isinstance(f, Mixing) and f.effort <= CHEAP for f in heavy)):
            return None
        values = [self._applied(tuple(prefix), w) for w in hub.operands]
        together = up(sum(self.bound(v).value for v in values) * (1 + 2.0**-50))
        base = self.bound(hub).value
        if not math.isfinite(together) or base == 0 or together >= base * self.weigh(prefix).value:
            return None
        rest = self.weigh(steps[count:])
        rows = [self._row(s, 1.0, "over the terms of the sum", together) for s in prefix]
        last = max(i for i, s in enumerate(prefix) if isinstance(s.factor, Mixing))
        saving = 1 - together / base / math.prod(row.alone for row in rows)
        rows[last] = replace(rows[last], value=together / base, method="merged", guarantee="upper", saving=saving)
        tail = self._table(steps[count:], rest, together)
        return Bound(product((together, rest.value)), (*rows, *tail), (hub,))

    def _terms(self, value: Value) -> int:
        total, stack = 0, [value]
        while stack and total <= _MOST_TERMS:
            value = stack.pop()
            value = self.rewritten.get(value, value)
            while isinstance(value, Apply) and value.factor.linear:
                value = value.operand
            if isinstance(value, Sum):
                stack.extend(value.operands)
            else:
                total += 1
        return total + len(stack)

    def _applied(self, prefix: tuple[Step, ...], operand: Value) -> Value:
        key = (operand, tuple(s.factor for s in prefix))
        if key not in self._spread:
            value = operand
            for step in prefix:
                value = Apply(step.out, step.where, step.factor, value)
            self._spread[key] = value
        return self._spread[key]


def _small(shape: Shape) -> bool:
    return None not in shape and math.prod(shape) <= 1000  # type: ignore[arg-type]


def _leaves(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(leaf for step in steps for leaf in step.leaves)


def _labels(steps: Sequence[Step]) -> str:
    names = list(dict.fromkeys(map(_label, steps)))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _label(step: Step) -> str:
    return step.where.path or step.where.op
