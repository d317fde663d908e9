"""Factors: the maps that a network is composed of, each with its constant and with what passes through it unharmed.

For ‖f(x) - f(y)‖ ≤ L‖x - y‖ to be tighter than a product, a factor must say more than one number. A `Local` map keeps
the channels apart, so that it has a constant a channel, and these may be folded into the map before or after it:
if ‖D_j‖ ≤ d_j = p_j·q_j, then ‖B∘D∘A‖ ≤ ‖B·diag(p)‖·‖diag(q)·A‖, even where D is not linear.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from opnorm.bound import Guarantee
from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator

Shape = tuple[int | None, ...]
_FOLDABLE = 2**23  # entries up to which a weight is spelled out to be carried through a reshape
_LOOSE = (
    100  # positions up to which every channel is evaluated exactly: beyond, Fourier bounds are within about a per cent
)
_UP = 1 + 2.0**-50  # more than two roundings of a float64
_TINY = 1e-290  # products stay above, since floats lose their precision below 1e-308
_SLACK = 1 + 1e-11  # eigenvalues of 10^4 rows, and weights folded into so many columns, are off by less than 10^-12


def up(value: float) -> float:
    """`value` nudged upward by more than the rounding of the products and sums that made it."""
    return value * _UP


def product(values: Iterable[float]) -> float:
    """Π values, never below: rounded up, and not lost where it is too small for a float."""
    result, count, zero = 1.0, 0, False
    for value in values:
        zero = zero or value == 0
        result, count = max(result * value, _TINY), count + 1
    return 0.0 if zero else result * (1 + count * 2.0**-51)


@dataclass(frozen=True)
class Measured:
    """The norm of a factor: never below the truth where the guarantee is `"exact"` (to rounding) or `"upper"`."""

    value: float
    guarantee: Guarantee = "exact"
    method: str = "closed form"


class Factor(ABC):
    """A map f with ‖f(x) - f(y)‖ ≤ c‖x - y‖; linear ones (constants aside) may be merged with each other."""

    linear: bool = False

    @abstractmethod
    def alone(self, ord: float) -> Measured:
        """The constant of this factor by itself."""

    def apply(self, x: Tensor) -> Tensor:
        """The linear part of the map on a tensor of the real shape; only asked of linear factors."""
        raise NotImplementedError(type(self).__name__)


class Local(Factor):
    """A map of independent blocks: entries that differ in one of the `independent` dimensions never meet.

    Input and output have the same number of dimensions, and the same size in the independent ones.
    """

    independent: frozenset[int]

    @abstractmethod
    def scales(self, ord: float) -> Tensor:
        """The constant of each block: a tensor that broadcasts against the value, of size 1 in the other dimensions."""

    def alone(self, ord: float) -> Measured:
        return Measured(up(float(self.scales(ord).amax())))

    def carry(self, weights: Tensor) -> Tensor:
        """Weights w' ≥ w that are one number a block, so that they pass through in both directions."""
        shared = [i for i in range(weights.dim()) if i not in self.independent and weights.shape[i] > 1]
        return weights.amax(shared, keepdim=True) if shared else weights


@dataclass(frozen=True, eq=False)
class Elementwise(Local):
    """|f(a) - f(b)| ≤ c|a - b| in every entry.

    Args:
        constant: c, the same everywhere.
        ndim: the number of dimensions of the value.
    """

    constant: float
    ndim: int
    source: str = "largest slope"

    @property
    def independent(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset(range(self.ndim))

    def scales(self, ord: float) -> Tensor:
        return torch.full((1,) * self.ndim, self.constant, dtype=torch.float64)

    def alone(self, ord: float) -> Measured:
        return Measured(self.constant, method=self.source)


@dataclass(frozen=True, eq=False)
class Diagonal(Local):
    """x ↦ d·x with a constant d that broadcasts against x; if not linear, any f with |f(a) - f(b)| ≤ |d|·|a - b|."""

    values: Tensor
    ndim: int
    linear: bool = True
    slack: float = 0.0

    def __post_init__(self) -> None:
        values = self.values.detach().double()
        object.__setattr__(self, "values", values.reshape((1,) * (self.ndim - values.dim()) + tuple(values.shape)))

    @property
    def independent(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset(range(self.ndim))

    def scales(self, ord: float) -> Tensor:
        return self.values.abs() + self.slack

    def apply(self, x: Tensor) -> Tensor:
        return x * self.values.to(x)


@dataclass(frozen=True, eq=False)
class Blockwise(Local):
    """A map with one constant for all of its blocks: pooling, softmax, sorting, padding, interpolation."""

    constant: float
    independent: frozenset[int]
    ndim: int
    forward: Callable[[Tensor], Tensor] | None = None
    guarantee: Guarantee = "exact"
    method: str = "closed form"
    extremum: tuple[str, int] | None = None

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.forward is not None

    def scales(self, ord: float) -> Tensor:
        return torch.full((1,) * self.ndim, self.constant, dtype=torch.float64)

    def alone(self, ord: float) -> Measured:
        return Measured(self.constant, self.guarantee, self.method)

    def apply(self, x: Tensor) -> Tensor:
        if self.forward is None:
            return super().apply(x)
        return self.forward(x)


@dataclass(frozen=True, eq=False)
class Depthwise(Local):
    """A depthwise convolution with one output a channel: ‖K‖ = max_c ‖K_c‖."""

    operator: ConvOperator
    linear: bool = True
    slack: float = 0.0
    _cache: dict[float, tuple[Tensor, Measured]] = field(default_factory=dict, repr=False)

    @property
    def independent(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset((0, 1))

    def scales(self, ord: float) -> Tensor:
        return self._measured(ord)[0]

    def alone(self, ord: float) -> Measured:
        return self._measured(ord)[1]

    def apply(self, x: Tensor) -> Tensor:
        return ConvOperator(self.operator.geometry, self.operator.weight.to(x)).matvec(x)

    def _measured(self, ord: float) -> tuple[Tensor, Measured]:
        if ord not in self._cache:
            values, measured = depthwise_norms(self.operator, ord)
            values, measured = values + self.slack, replace(measured, value=measured.value + self.slack)
            self._cache[ord] = values.reshape(1, -1, *(1,) * self.operator.geometry.dim), measured
        return self._cache[ord]


class Mixing(Factor):
    """A linear map between channels, whose norm can be taken with weights on both sides: ‖diag(left)·K·diag(right)‖."""

    linear = True

    @abstractmethod
    def measure(self, ord: float, left: Tensor | None = None, right: Tensor | None = None) -> Measured:
        """‖diag(left)·K·diag(right)‖ for non-negative weights that broadcast against the output and the input."""

    def alone(self, ord: float) -> Measured:
        return self.measure(ord)

    @property
    @abstractmethod
    def effort(self) -> float:
        """Roughly the number of multiplications that a norm takes."""


@dataclass(frozen=True, eq=False)
class Convolution(Mixing):
    """A convolution that mixes channels: dense, grouped, pointwise, transposed; dimension 1 holds the channels.

    Args:
        operator: the convolution.
        slack: an upper bound of the norm of what rounding did to its weight, where that was computed.
    """

    operator: ConvOperator
    slack: float = 0.0

    def measure(self, ord: float, left: Tensor | None = None, right: Tensor | None = None) -> Measured:
        geometry, weight = self.operator.geometry, self.operator.weight
        left, right = per_channel(left, 1, geometry.out_channels), per_channel(right, 1, geometry.in_channels)
        measured = norm_of(ConvOperator(geometry, scaled_weight(geometry, weight, left, right)), ord)
        return replace(measured, value=up(measured.value + up(self.slack * largest(left) * largest(right))))

    def apply(self, x: Tensor) -> Tensor:
        return ConvOperator(self.operator.geometry, self.operator.weight.to(x)).matvec(x)

    @property
    def effort(self) -> float:
        g = self.operator.geometry
        rows, columns = g.out_channels // g.groups, g.in_channels // g.groups
        frequencies = 1 if g.is_matrix else g.groups * math.prod(min(a.inputs or 128, 128) + a.extent for a in g.axes)
        return float(frequencies * rows * columns * min(rows, columns)) * (1 if g.is_matrix else 8)  # complex, iterated


@dataclass(frozen=True, eq=False)
class Matrix(Mixing):
    """y = Mx along one dimension, the same at every position of the others: a linear layer on any axis."""

    matrix: Tensor  # (out, in)
    axis: int

    def measure(self, ord: float, left: Tensor | None = None, right: Tensor | None = None) -> Measured:
        rows, columns = self.matrix.shape
        matrix = self.matrix
        if (scale := per_channel(left, self.axis, rows)) is not None:
            matrix = matrix * scale[:, None]
        if (scale := per_channel(right, self.axis, columns)) is not None:
            matrix = matrix * scale
        return norm_of(ConvOperator(ConvGeometry(columns, rows, (), ()), matrix), ord)

    def apply(self, x: Tensor) -> Tensor:
        return torch.movedim(torch.movedim(x, self.axis, -1) @ self.matrix.to(x).T, -1, self.axis)

    @property
    def effort(self) -> float:
        return float(self.matrix.numel() * min(self.matrix.shape))


@dataclass(frozen=True, eq=False)
class Opaque(Factor):
    """A map of which only the constant is known."""

    constant: float
    method: str = "user rule"

    def alone(self, ord: float) -> Measured:
        return Measured(self.constant, "upper", self.method)


@dataclass(frozen=True, eq=False)
class Relabel(Factor):
    """Every output is an input, y_i = x_{π(i)}, or a constant; the norm is the root of the largest multiplicity.

    Args:
        move: the operation itself, on a tensor of the input's shape.
        input_shape: that shape.
        multiplicity: how often the most used input is used; 1 for views, permutations and slices.
        taken: (dimension, start, stop) where this is a slice.
        dims: the permutation where this is one.
    """

    move: Callable[[Tensor], Tensor]
    input_shape: Shape
    multiplicity: int = 1
    taken: tuple[int, int, int] | None = None
    dims: tuple[int, ...] | None = None
    linear: bool = True

    def alone(self, ord: float) -> Measured:
        power = {1.0: 1.0, 2.0: 0.5}.get(float(ord), 0.0)
        return Measured(up(self.multiplicity**power) if self.multiplicity > 1 else float(self.multiplicity))

    def carry(self, weights: Tensor) -> Tensor | None:
        """The weights behind this map, diag(w')·R = R·diag(w); None where they are not worth spelling out."""
        if self.dims is not None:
            return weights.permute(self.dims)
        if None in self.input_shape or math.prod(self.input_shape) > _FOLDABLE:  # type: ignore[arg-type]
            return None
        return self.move(weights.expand(self.input_shape))  # type: ignore[arg-type]

    def carry_back(self, weights: Tensor) -> Tensor | None:
        """The weights before this map; only for permutations."""
        if self.dims is None:
            return None
        return weights.permute(tuple(torch.tensor(self.dims).argsort().tolist()))

    def apply(self, x: Tensor) -> Tensor:
        return self.move(x)


def per_channel(weights: Tensor | None, axis: int, size: int) -> Tensor | None:
    """Weights collapsed upward to one number an entry of `axis`; None where there is nothing to weigh."""
    if weights is None or (weights.numel() == 1 and float(weights) == 1.0):
        return None
    others = [i for i in range(weights.dim()) if i != axis and weights.shape[i] > 1]
    flat = weights.amax(others) if others else weights.reshape(-1)
    return flat.reshape(-1).expand(size)


def scaled_weight(geometry: ConvGeometry, weight: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The weight of diag(left)·K·diag(right)."""
    first, second = (right, left) if geometry.transposed else (left, right)  # torch stores (rows, columns of a group)
    tail = (1,) * (weight.dim() - 2)
    if first is not None:
        weight = weight * first.reshape(-1, 1, *tail)
    if second is not None:
        table = second.reshape(geometry.groups, 1, -1).expand(-1, weight.shape[0] // geometry.groups, -1)
        weight = weight * table.reshape(weight.shape[0], -1, *tail)
    return weight


def norm_of(operator: ConvOperator, ord: float) -> Measured:
    """‖K‖ in double precision, proven: exact or from above, and nudged upward by more than its rounding."""
    from opnorm.norms.functional import operator_norm

    bound = operator_norm(operator.detach().to(torch.float64), guarantee="upper", ord=ord)
    return Measured(float(bound) * _SLACK, bound.guarantee, type(bound.method).__name__)


def depthwise_norms(operator: ConvOperator, ord: float) -> tuple[Tensor, Measured]:
    """‖K_c‖ of every channel of a depthwise convolution with one output a channel, and the norm of the whole."""
    operator = operator.detach().to(torch.float64)
    if ord == 2:
        from opnorm.norms.fourier import FourierBound

        size = operator.geometry.input_size
        small = None not in size and math.prod(size) <= _LOOSE  # type: ignore[arg-type]
        bound = FourierBound(refine=operator.geometry.in_channels if small else 0).compute(operator)
        if bound.per_channel is not None:
            whole = norm_of(operator, ord)  # which evaluates the largest channels exactly where that pays
            values = (bound.per_channel.double() * _SLACK).clamp(max=whole.value)
            return values, replace(whole, value=min(whole.value, float(values.amax())))
    geometry = operator.geometry
    one = _one_channel(geometry)
    norms = [norm_of(ConvOperator(one, operator.weight[c : c + 1]), ord) for c in range(geometry.in_channels)]
    worst = max(norms, key=lambda m: m.value)
    return torch.tensor([m.value for m in norms], dtype=torch.float64), worst


def _one_channel(geometry: ConvGeometry) -> ConvGeometry:
    fields = {name: getattr(geometry, name) for name in geometry.__dataclass_fields__}
    return ConvGeometry(**(fields | {"in_channels": 1, "out_channels": 1, "groups": 1}))


def largest(weights: Tensor | None) -> float:
    """The largest of some weights; None stands for ones."""
    return 1.0 if weights is None else float(weights.amax())
