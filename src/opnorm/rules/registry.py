"""`lipschitz_rule`: one registered rule an operation, and the `Call` that a rule is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opnorm.rules.expression import Apply, Value, Where, chain
from opnorm.rules.factors import Factor, Opaque, Shape

Rule = Callable[["Call"], Any]
_RULES: dict[Any, Rule] = {}


class Refused(Exception):
    """An operation that has no finite, or no known, Lipschitz constant; collected, and raised together at the end."""


@dataclass(frozen=True)
class Unusable:
    """A result that depends on the input but not continuously; using it is refused."""

    reason: str


@dataclass(frozen=True, eq=False)
class Call:
    """One operation of the graph whose result depends on the input of the network.

    `call["name"]` is an argument by its name in the operator's schema: a `Value` where it depends on the input, and a
    tensor, a number or what it is otherwise.

    Attributes:
        where: operation, module path and node.
        ord: the norm that the certificate is in: 1, 2 or inf.
        shape: the shape of the result, None for a size that is not known; a list of them where there are several.
    """

    target: Any
    where: Where
    arguments: Mapping[str, Any]
    ord: float
    shape: Any

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def values(self) -> list[Value]:
        """The arguments that depend on the input."""
        return [v for v in _flat(self.arguments.values()) if isinstance(v, Value)]

    @property
    def operand(self) -> Value:
        """The one argument that depends on the input."""
        values = self.values
        if len(values) != 1:
            raise Refused(f"{len(values)} of its arguments depend on the input; only one may")
        return values[0]

    def only(self, name: str) -> Value:
        """The argument `name`, as the only one that depends on the input."""
        operand = self.operand
        if self.arguments[name] is not operand:
            raise Refused(f"its argument {name!r} does not depend on the input, while another one does")
        return operand

    def apply(self, operand: Value, *factors: Factor, shape: Shape | None = None) -> Value:
        """The factors, one after the other, on a value; all but the last keep its shape."""
        shapes = [operand.shape] * (len(factors) - 1) + [self.shape if shape is None else shape]
        return chain(operand, factors, shapes, self.where)


def lipschitz_rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register how an ATen operation bounds ‖f(x) - f(y)‖: `rule(call)` returns its constant, a `Factor`, or values.

    A number is the Lipschitz constant in the one argument that depends on the input, in the norm `call.ord`.
    Raise `Refused("reason")` where there is none.

    Examples:
        >>> import torch, opnorm
        >>> @opnorm.lipschitz_rule(torch.ops.aten.sinc.default)
        ... def sinc(call):
        ...     return opnorm.rules.Elementwise(1.3705, call.operand.ndim)  # the largest slope of sin(πx)/(πx)
    """

    def register(rule: Rule) -> Rule:
        for operation in operations:
            if operation in _RULES:
                raise ValueError(
                    f"expected an operation without a rule, got {operation}, which has {_RULES[operation].__name__}; "
                    "remove that one first with opnorm.rules.forget(operation)"
                )
        for operation in operations:
            _RULES[operation] = rule
        return rule

    return register


def forget(operation: Any) -> Rule:
    """Remove and return the rule of an operation."""
    if operation not in _RULES:
        raise ValueError(f"expected an operation with a rule, got {operation}; see opnorm.rules.known()")
    return _RULES.pop(operation)


def known() -> list[Any]:
    """The operations that have a rule."""
    return sorted(_RULES, key=str)


def evaluate(call: Call) -> Any:
    """The result of the rule for a call: a value, or a tuple of them."""
    rule = _RULES.get(call.target)
    if rule is None:
        raise Refused("no rule for this operation")
    if call.target in _SHAPE_OF_OTHER and isinstance(other := call["other"], Value):
        shape = concrete(other.shape, "the shape of another value")
        call = replace(call, arguments={**call.arguments, "other": torch.zeros(()).expand(shape)})
    result = rule(call)
    if isinstance(result, (Value, tuple, list)):
        return result
    if isinstance(result, Factor):
        return Apply(call.shape, call.where, result, call.operand)
    return Apply(call.shape, call.where, Opaque(_constant(result, rule)), call.operand)


def aten(*names: str) -> tuple[Any, ...]:
    """The overloads `"relu.default"`, ... of torch.ops.aten that this version of torch has."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operation is not None:
            found.append(operation)
    return tuple(found)


_SHAPE_OF_OTHER = aten("expand_as.default", "view_as.default", "reshape_as.default")


def concrete(shape: Shape, what: str) -> tuple[int, ...]:
    """A shape with all sizes known."""
    if None in shape:
        raise Refused(f"{what} needs to know the input size; certify at a fixed one")
    return tuple(int(n) for n in shape)  # type: ignore[arg-type]


def dimension(index: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return index % ndim if ndim else 0


def _constant(result: Any, rule: Rule) -> float:
    if isinstance(result, Tensor) and result.numel() == 1:
        result = float(result)
    if not isinstance(result, (int, float)) or isinstance(result, bool) or not 0 <= result < math.inf:
        raise ValueError(
            f"expected {rule.__name__} to return a Lipschitz constant (finite, not negative), a Factor or values, "
            f"got {result!r}; raise opnorm.rules.Refused(reason) where there is no constant"
        )
    return float(result)


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
            yield from _flat(item)
        else:
            yield item


def several(shapes: Any) -> Sequence[Shape]:
    """The shapes of the results of an operation with several."""
    return shapes if isinstance(shapes, list) else [shapes]
