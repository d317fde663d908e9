"""Pooling and interpolation: maps of each channel alone, with exact constants.

Average pooling and interpolation are linear and separable, A = A₁ ⊗ … ⊗ A_d, so that ‖A‖ = Π ‖A_i‖: the norm of a small
matrix an axis, read off by running the operation on the unit vectors of that axis. Max pooling changes an output by at
most the largest change in its window, so that an input that lies in m windows counts m times: √m.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator
from opnorm.rules.expression import Value
from opnorm.rules.factors import Blockwise, norm_of
from opnorm.rules.registry import Call, Refused, Unusable, aten, concrete, lipschitz_rule
from opnorm.rules.shapes import _move

_WORKSPACE = 2**22  # numbers that unit vectors may take at a time


@lipschitz_rule(*aten("max_pool1d.default", "max_pool2d.default", "max_pool3d.default"))
def max_pool(call: Call) -> Value:
    """√m, m the largest number of windows that share an input."""
    return _max_pool(call, call.shape)


@lipschitz_rule(*aten(
    "max_pool1d_with_indices.default", "max_pool2d_with_indices.default", "max_pool3d_with_indices.default",
))  # fmt: skip
def max_pool_with_indices(call: Call) -> tuple[Value, Unusable]:
    """√m; the indices jump."""
    return _max_pool(call, call.shape[0]), Unusable("the place of the largest entry jumps as the input changes")


def _max_pool(call: Call, shape: Any) -> Value:
    operand = call.only("self")
    dim = len(shape) - 2
    kernel = _spread(call["kernel_size"], dim)
    stride = _spread(call["stride"] or kernel, dim)
    padding, dilation = _spread(call["padding"], dim), _spread(call["dilation"], dim)
    sizes = zip(operand.shape[2:], shape[2:], kernel, stride, padding, dilation, strict=True)
    windows = math.prod(_windows(*axis) for axis in sizes)
    return call.apply(operand, _per_channel(call, _power(windows, call.ord), None, "windows"), shape=shape)


def _windows(n: int | None, outputs: int | None, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The largest number of windows of one axis that an input lies in."""
    if n is None or outputs is None:
        phases = [sum(1 for k in range(kernel) if (k * dilation) % stride == phase) for phase in range(stride)]
        return max(phases)
    starts = torch.arange(outputs)[:, None] * stride - padding
    reads = (starts + dilation * torch.arange(kernel)).reshape(-1)
    reads = reads[(reads >= 0) & (reads < n)]
    return int(torch.bincount(reads).max()) if len(reads) else 0


@lipschitz_rule(*aten("adaptive_max_pool1d.default", "adaptive_max_pool2d.default", "adaptive_max_pool3d.default"))
def adaptive_max_pool(call: Call) -> tuple[Value, Unusable]:
    """√m, as for max pooling; window i of n reads from ⌊iN/n⌋ to ⌈(i+1)N/n⌉."""
    operand, shape = call.only("self"), call.shape[0]
    windows = 1
    for n, outputs in zip(operand.shape[2:], shape[2:], strict=True):
        if outputs == 1:
            continue
        if n is None or outputs is None:
            raise Refused("adaptive pooling to more than one output needs to know the input size")
        counts = torch.zeros(n, dtype=torch.long)
        for i in range(outputs):
            counts[i * n // outputs : -(-(i + 1) * n // outputs)] += 1
        windows *= int(counts.max())
    value = call.apply(operand, _per_channel(call, _power(windows, call.ord), None, "windows"), shape=shape)
    return value, Unusable("the place of the largest entry jumps as the input changes")


@lipschitz_rule(*aten(
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default", "_adaptive_avg_pool2d.default",
    "_adaptive_avg_pool3d.default", "upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec",
    "upsample_bicubic2d.vec",
    "upsample_linear1d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default",
    "upsample_bicubic2d.default", "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec",
    "_upsample_bilinear2d_aa.default", "_upsample_bicubic2d_aa.default",
))  # fmt: skip
def separable(call: Call) -> Value:
    """Π ‖A_i‖ over the axes."""
    operand = call.operand
    if operand.ndim != len(call.shape) or operand.ndim < 3:
        raise Refused("it is applied to a tensor without a batch dimension; give the model one")
    if call.arguments.get("divisor_override"):
        return _windowed(call, operand)
    if None in operand.shape:
        return _any_size(call, operand)
    constant, exact = _separable_norm(_move(call), concrete(operand.shape, "pooling")[2:], call.ord)
    if exact:
        return call.apply(operand, _per_channel(call, constant, _move(call), "Kronecker product"))
    return _windowed(call, operand)


def _any_size(call: Call, operand: Value) -> Value:
    """Pooling at sizes that are not known: rows are averages, and an input is in one window only, or in all of one."""
    kernel = call.arguments.get("kernel_size")
    dim = operand.ndim - 2
    if kernel is None:
        if all(n == 1 for n in call.shape[2:]):
            return call.apply(operand, _per_channel(call, 1.0, None, "global mean, any size"))
        raise Refused("its norm depends on the input size; certify at a fixed one")
    if any(call["padding"]) or call["ceil_mode"]:
        raise Refused("with padding or ceil_mode its norm depends on the input size; certify at a fixed one")
    weight = torch.full((1, 1, *_spread(kernel, dim)), 1 / math.prod(_spread(kernel, dim)), dtype=torch.float64)
    stride = _spread(call["stride"] or kernel, dim)
    geometry = ConvGeometry(1, 1, _spread(kernel, dim), operand.shape[2:], stride=stride)
    measured = norm_of(ConvOperator(geometry, weight), call.ord)
    return call.apply(operand, _per_channel(call, measured.value, None, measured.method))


def _windowed(call: Call, operand: Value) -> Value:
    """The norm of the map of one channel as a dense matrix, where it is not a product over the axes."""
    sizes = concrete(operand.shape, "pooling")[2:]
    count = math.prod(sizes)
    if count > 4096:
        raise Refused(f"its norm is not a product over the axes, and {count} positions are too many for a dense matrix")
    columns = _move(call)(torch.eye(count, dtype=torch.float64).reshape(count, 1, *sizes)).reshape(count, -1)
    measured = norm_of(ConvOperator(ConvGeometry(count, columns.shape[1], (), ()), columns.T.contiguous()), call.ord)
    return call.apply(operand, _per_channel(call, measured.value, _move(call), "dense"))


def _separable_norm(move: Callable[[Tensor], Tensor], sizes: tuple[int, ...], ord: float) -> tuple[float, bool]:
    """Π ‖A_i‖ with A_i read off along the axes, and whether A is their product (checked on a random input)."""
    generator = torch.Generator().manual_seed(0)
    matrices = [_axis_matrix(move, sizes, axis) for axis in range(len(sizes))]
    x = torch.rand((1, 1, *sizes), dtype=torch.float64, generator=generator)
    full, product = move(x), x
    for axis, matrix in enumerate(matrices):
        product = torch.movedim(torch.movedim(product, axis + 2, -1) @ matrix.T, -1, axis + 2)
    if product.shape != full.shape or not bool(full.isfinite().all()) or float(product.norm()) == 0:
        return 0.0, False
    scale = float((full * product).sum() / (product * product).sum())
    if not torch.allclose(full, scale * product, rtol=1e-9, atol=1e-12):
        return 0.0, False
    norms = [norm_of(ConvOperator(ConvGeometry(m.shape[1], m.shape[0], (), ()), m), ord).value for m in matrices]
    return abs(scale) * math.prod(norms) * (1 + 1e-9), True


def _axis_matrix(move: Callable[[Tensor], Tensor], sizes: tuple[int, ...], axis: int) -> Tensor:
    """A_i up to a factor: the map of inputs that vary along one axis and are constant along the others."""
    n = sizes[axis]
    shape = [n, 1, *(n if i == axis else s for i, s in enumerate(sizes))]
    view = [n, 1, *(n if i == axis else 1 for i in range(len(sizes)))]
    chunk = max(1, _WORKSPACE // math.prod(sizes))
    rows = []
    for units in torch.eye(n, dtype=torch.float64).reshape(view).split(chunk):
        y = move(units.expand(len(units), *shape[1:]))  # (units, 1, *out)
        rows.append(
            y[(slice(None), 0, *(slice(None) if i == axis else y.shape[i + 2] // 2 for i in range(len(sizes))))]
        )
    return torch.cat(rows).T.contiguous()  # (out, in)


def _per_channel(call: Call, constant: float, forward: Any, method: str) -> Blockwise:
    return Blockwise(constant, frozenset((0, 1)), call.operand.ndim, forward, method=method)


def _power(multiplicity: int, ord: float) -> float:
    power = {1.0: 1.0, 2.0: 0.5}.get(float(ord), 0.0)
    return math.nextafter(multiplicity**power, math.inf) if multiplicity > 1 else float(multiplicity)


def _spread(value: Any, dim: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * dim if len(values) == 1 else values
