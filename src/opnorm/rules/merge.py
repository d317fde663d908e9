"""Merging linear maps: two convolutions that are one, sums of convolutions, and whole chains as one small matrix.

y_i = Σ_n W_n x_{s·i + n - a} describes every convolution whose padding comes from its input. Two of them compose to
a third where the inner one has a single tap, or the outer one no padding; sums of them are one, taps added where they
meet. So depthwise → batch norm → pointwise is a dense convolution, and x + Kx is K with one added to its middle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator
from opnorm.rules.factors import (
    Convolution,
    Depthwise,
    Diagonal,
    Elementwise,
    Factor,
    Matrix,
    Measured,
    Relabel,
    Shape,
    norm_of,
)

_MOST_WEIGHTS = 2**24  # entries of a merged kernel
SLACK = 1e-9  # of the product of the norms: more than n²·2⁻⁵³, what merging n ≤ 2000 channels can lose to rounding


@dataclass(frozen=True, eq=False)
class Taps:
    """y_i = Σ_n W_n x_{s·i + n - a}, dilation spelled out as zeros.

    Args:
        weight: (out, in, *kernel), or (channels, 1, *kernel) for a map of each channel alone.
        alone: whether it is the latter.
        stride, before, after: per dimension, as in `Axis`.
        size: the input size.
        mode: where positions beyond the input are read from.
    """

    weight: Tensor
    alone: bool
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    size: Shape
    mode: str = "zeros"

    @property
    def kernel(self) -> tuple[int, ...]:
        """Taps per dimension."""
        return tuple(self.weight.shape[2:])

    @property
    def single(self) -> bool:
        """Whether every output reads one position, with no padding: padding behind it might as well be before it."""
        return all(k == 1 for k in self.kernel) and not any(self.before) and not any(self.after)

    @property
    def valid(self) -> bool:
        """Whether nothing beyond the input is read."""
        return not any(self.before) and not any(self.after)

    def factor(self, slack: float = 0.0) -> Factor:
        """The same map as a factor that has a norm, and `slack` for the roundings that made it."""
        rows, columns = self.weight.shape[:2]
        if self.alone and self.single and all(s == 1 for s in self.stride):
            return Diagonal(self.weight.reshape(1, rows, *self.kernel), len(self.kernel) + 2, slack=slack)
        channels = rows if self.alone else columns
        geometry = ConvGeometry(
            channels, rows, self.kernel, self.size, stride=self.stride, groups=channels if self.alone else 1,
            padding=tuple(zip(self.before, self.after, strict=True)), padding_mode=self.mode,
        )  # fmt: skip
        operator = ConvOperator(geometry, self.weight)
        return Depthwise(operator, slack=slack) if self.alone else Convolution(operator, slack)

    def dense(self) -> Taps:
        """The same map with a weight between all channels."""
        if not self.alone:
            return self
        channels = self.weight.shape[0]
        weight = self.weight.new_zeros(channels, channels, *self.kernel)
        index = torch.arange(channels)
        weight[index, index] = self.weight[:, 0]
        return replace(self, weight=weight, alone=False)


def taps_of(factor: Factor, shape: Shape) -> Taps | None:
    """A factor on values of a shape as `Taps`, if it is of that form."""
    dim = len(shape) - 2
    ones, zeros = (1,) * dim, (0,) * dim
    if isinstance(factor, (Depthwise, Convolution)):
        return _taps_of_convolution(factor.operator)
    if isinstance(factor, Matrix) and factor.axis == 1:
        return Taps(factor.matrix[(..., *(None,) * dim)], False, ones, zeros, zeros, shape[2:])
    if isinstance(factor, Diagonal) and factor.linear and shape[1] is not None:
        values = factor.values
        if any(n != 1 for i, n in enumerate(values.shape) if i != 1):
            return None
        return Taps(values.reshape(-1, 1, *ones).expand(shape[1], 1, *ones), True, ones, zeros, zeros, shape[2:])
    return None


def _taps_of_convolution(operator: ConvOperator) -> Taps | None:
    g, weight = operator.geometry, operator.weight
    if g.transposed:
        return None
    alone = g.groups == g.in_channels == g.out_channels
    if g.groups > 1 and not alone:
        if g.in_channels * g.out_channels * math.prod(g.kernel_size) > _MOST_WEIGHTS:
            return None
        rows, columns = g.out_channels // g.groups, g.in_channels // g.groups
        full = weight.new_zeros(g.groups, rows, g.groups, columns, *g.kernel_size)
        index = torch.arange(g.groups)
        full[index, :, index] = weight.reshape(g.groups, rows, columns, *g.kernel_size)
        weight = full.reshape(g.out_channels, g.in_channels, *g.kernel_size)
    before, after = (tuple(p[i] for p in g.padding) for i in (0, 1))
    mode = g.padding_mode if any(before) or any(after) else "zeros"
    return Taps(_dilated(weight, g.dilation), alone, g.stride, before, after, g.input_size, mode)


def compose(outer: Taps, inner: Taps) -> Taps | None:
    """outer∘inner as one convolution, or None where it is none."""
    if not (outer.valid or inner.single):
        return None
    alone = outer.alone and inner.alone
    rows, columns = outer.weight.shape[0], (inner.weight.shape[0] if inner.alone else inner.weight.shape[1])
    kernel = tuple(i + s * (o - 1) for i, o, s in zip(inner.kernel, outer.kernel, inner.stride, strict=True))
    if (rows * (1 if alone else columns)) * math.prod(kernel) > _MOST_WEIGHTS:
        return None
    after = _after(outer, inner)
    if after is None:
        return None
    weight = outer.weight.new_zeros(rows, 1 if alone else columns, *kernel)
    matrices = outer.weight.reshape(*outer.weight.shape[:2], -1).unbind(-1)
    for tap, matrix in zip(_positions(outer.kernel), matrices, strict=True):
        window = [slice(t * s, t * s + k) for t, s, k in zip(tap, inner.stride, inner.kernel, strict=True)]
        part = weight[(slice(None), slice(None), *window)]  # a view
        part += _product(outer, inner, matrix)
    return Taps(
        weight, alone, tuple(a * b for a, b in zip(outer.stride, inner.stride, strict=True)),
        tuple(i + s * o for i, o, s in zip(inner.before, outer.before, inner.stride, strict=True)), after, inner.size,
        outer.mode if inner.single else inner.mode,
    )  # fmt: skip


def _after(outer: Taps, inner: Taps) -> tuple[int, ...] | None:
    """The padding at the end that gives the composition its number of outputs."""
    if outer.valid:
        return inner.after
    result = []
    for b, s, n in zip(outer.after, inner.stride, inner.size, strict=True):
        if s == 1:
            result.append(b)
        elif n is None or outer.mode != "zeros":
            return None
        else:
            result.append(s * b + s * ((n - 1) // s + 1) - n)
    return tuple(result)


def _product(outer: Taps, inner: Taps, tap: Tensor) -> Tensor:
    """One tap (out, in) of the outer map times all taps of the inner one."""
    spread = (..., *(None,) * len(inner.kernel))
    if inner.alone:
        if outer.alone:
            return tap[spread] * inner.weight
        return tap[spread] * inner.weight[:, 0][None]
    if outer.alone:
        return tap[spread] * inner.weight
    return torch.tensordot(tap, inner.weight, dims=1)


def add(terms: Sequence[Taps]) -> Taps | None:
    """The sum of maps between the same tensors as one convolution, or None where it is none."""
    first = terms[0]
    modes = {t.mode for t in terms if not t.valid} or {"zeros"}
    if len(modes) > 1 or any(t.stride != first.stride for t in terms):
        return None
    # per dimension; the number of outputs is ⌊(N + a + b - k)/s⌋ + 1, so that a + b - k must agree
    excess = [tuple(a + b - k for a, b, k in zip(t.before, t.after, t.kernel, strict=True)) for t in terms]
    if len(set(excess)) > 1:
        return None
    alone = all(t.alone for t in terms)
    terms = terms if alone else [t.dense() for t in terms]
    before = tuple(max(values) for values in zip(*(t.before for t in terms), strict=True))
    after = tuple(max(values) for values in zip(*(t.after for t in terms), strict=True))
    kernel = tuple(a + b - e for a, b, e in zip(before, after, excess[0], strict=True))
    if math.prod(first.weight.shape[:2]) * math.prod(kernel) > _MOST_WEIGHTS:
        return None
    weight = torch.zeros(*terms[0].weight.shape[:2], *kernel, dtype=torch.float64)
    for t in terms:
        start = [a - own for a, own in zip(before, t.before, strict=True)]
        window = tuple(slice(i, i + k) for i, k in zip(start, t.kernel, strict=True))
        weight[(slice(None), slice(None), *window)] += t.weight
    return Taps(weight, alone, first.stride, before, after, first.size, modes.pop())


def merged(factors: Sequence[Factor], shapes: Sequence[Shape]) -> Taps | None:
    """A chain of linear factors, on inputs of the given shapes, as one convolution; None where it is none."""
    result: Taps | None = None
    for factor, shape in zip(factors, shapes, strict=True):
        taps = taps_of(factor, shape)
        if taps is None:
            return None
        result = taps if result is None else compose(taps, result)
        if result is None:
            return None
    return result


@dataclass(frozen=True, eq=False)
class Spelled(Factor):
    """A linear map between small tensors as one matrix of all their entries.

    Args:
        matrix: the matrix, which took many roundings to make.
        out: the shape of the output.
        slack: an upper bound of what these amount to, as a norm.
    """

    matrix: Tensor
    out: Shape
    slack: float
    linear: bool = True

    def alone(self, ord: float) -> Measured:
        rows, columns = self.matrix.shape
        measured = norm_of(ConvOperator(ConvGeometry(columns, rows, (), ()), self.matrix), ord)
        return replace(measured, value=measured.value + self.slack)

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix.to(x) @ x.reshape(-1)).reshape(self.out)  # type: ignore[arg-type]


def spelled_out(
    chains: Sequence[Sequence[Factor]],
    shape: Shape,
    out: Shape,
    product: float,
    dim: int | None = None,
    most: int = 1100,
) -> Spelled | None:
    """Chains of linear factors, added up or side by side, as one matrix of all entries; None where it is not small.

    Args:
        chains: the factors of each chain, first applied first.
        shape, out: of the input and the output.
        product: the sum of the products of the factors' norms. A factor applied in double precision to n entries
            errs by at most 2n·2⁻⁵³·√n of its norm; eight times that for each factor is added to the norm of the matrix.
        dim: where the results are put side by side, the dimension; None to add them up.
        most: rows or columns, and half of the others, up to which it counts as small.
    """
    if None in shape or None in out:
        return None
    rows, columns = math.prod(out), math.prod(shape)  # type: ignore[arg-type]
    slack = product * max(SLACK, max(map(len, chains)) * 2.0**-49 * max(rows, columns) ** 1.5)
    if min(rows, columns) > most or max(rows, columns) > 2 * most:
        return None

    def run(x: Tensor) -> Tensor:
        results = []
        for factors in chains:
            y = x.reshape(shape)  # type: ignore[arg-type]
            for factor in factors:
                y = factor.apply(y)
            results.append(y)
        return (torch.stack(results).sum(0) if dim is None else torch.cat(results, dim)).reshape(-1)

    units = torch.eye(columns, dtype=torch.float64)
    origin = run(torch.zeros(columns, dtype=torch.float64))  # what padding with a number other than 0 adds
    try:
        matrix = torch.func.vmap(run)(units).T
    except (RuntimeError, NotImplementedError):  # an operation that vmap cannot batch
        matrix = torch.stack([run(unit) for unit in units], 1)
    matrix = matrix - origin[:, None]
    return Spelled(matrix.contiguous(), out, slack)


def hoist_permutations(factors: Sequence[Factor], ndim: int) -> tuple[list[Factor], list[int]]:
    """The chain with permutations moved behind what they commute with, and where each factor came from.

    F∘P = P∘F' where F acts on entries alone or along one axis, so that permute → linear → permute is a pointwise map.
    """
    result: list[Factor] = []
    origin: list[int] = []
    pending: tuple[int, ...] | None = None
    last = 0
    for index, factor in enumerate(factors):
        if isinstance(factor, Relabel) and factor.dims is not None:
            pending = factor.dims if pending is None else tuple(pending[d] for d in factor.dims)
            last = index
            if pending == tuple(range(len(pending))):
                pending = None
            continue
        moved = factor if pending is None else _before_permutation(factor, pending)
        if moved is None:
            result.append(_permutation(pending))  # type: ignore[arg-type]
            origin.append(last)
            pending, moved = None, factor
        result.append(moved)
        origin.append(index)
    if pending is not None:
        result.append(_permutation(pending))
        origin.append(last)
    return result, origin


def _before_permutation(factor: Factor, dims: tuple[int, ...]) -> Factor | None:
    """F' with F∘P = P∘F'."""
    if isinstance(factor, Elementwise):
        return factor
    if isinstance(factor, Diagonal):
        inverse = tuple(torch.tensor(dims).argsort().tolist())
        return Diagonal(factor.values.permute(inverse), factor.ndim, factor.linear)
    if isinstance(factor, Matrix):
        return Matrix(factor.matrix, dims[factor.axis])
    return None


def _permutation(dims: tuple[int, ...]) -> Relabel:
    return Relabel(lambda x: x.permute(dims), (None,) * len(dims), dims=dims)


def _dilated(weight: Tensor, dilation: tuple[int, ...]) -> Tensor:
    if all(d == 1 for d in dilation):
        return weight
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    result = weight.new_zeros(*weight.shape[:2], *extent)
    result[(slice(None), slice(None), *(slice(None, None, d) for d in dilation))] = weight
    return result


def _positions(kernel: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, kernel)))
