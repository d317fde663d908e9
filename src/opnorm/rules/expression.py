"""Values: what is known of a tensor that depends on the input, namely by which factors, sums and joins it came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opnorm.rules.factors import Factor, Shape


@dataclass(frozen=True)
class Where:
    """The place in the network that a value comes from: operation, module path and node of the exported graph."""

    op: str
    path: str
    node: str

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.op}"


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that depends on the input. Its batch size is 1: a certificate is about one sample at a time."""

    shape: Shape
    where: Where

    @property
    def ndim(self) -> int:
        """The number of dimensions, the batch included."""
        return len(self.shape)


@dataclass(frozen=True, eq=False)
class Source(Value):
    """The input of the network, or (with `known=False`) the output of an operation that had to be refused."""

    known: bool = True


@dataclass(frozen=True, eq=False)
class Constant(Value):
    """A constant among values: whatever the input does, it stays."""


@dataclass(frozen=True, eq=False)
class Apply(Value):
    """factor(operand)."""

    factor: Factor
    operand: Value


@dataclass(frozen=True, eq=False)
class Sum(Value):
    """The sum of the operands, constants aside; with `disjoint`, no two of them are non-zero in the same entry."""

    operands: tuple[Value, ...]
    disjoint: bool = False


@dataclass(frozen=True, eq=False)
class Concat(Value):
    """The operands side by side along `dim`."""

    operands: tuple[Value, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class Extremum(Value):
    """The largest, or smallest, of the operands in every entry."""

    operands: tuple[Value, ...]
    kind: str


def chain(operand: Value, factors: Sequence[Factor], shapes: Sequence[Shape], where: Where) -> Value:
    """Several factors applied one after the other at one place."""
    for factor, shape in zip(factors, shapes, strict=True):
        operand = Apply(shape, where, factor, operand)
    return operand
