"""Sums, scalings by constants, maxima and minima; products of two values that depend on the input are refused."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opnorm.rules.expression import Apply, Concat, Constant, Extremum, Sum, Value
from opnorm.rules.factors import Blockwise, Diagonal, Factor, Relabel, Shape
from opnorm.rules.registry import Call, Refused, Unusable, aten, concrete, dimension, lipschitz_rule


@lipschitz_rule(*aten("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar"))
def add(call: Call) -> Value:
    """x + αy: the sum of the bounds; a constant changes nothing."""
    alpha = float(call.arguments.get("alpha", 1))
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[call.target._schema.name.split("::")[1]]
    terms = [
        _scaled(call, broadcast(call, value, call.shape), sign)
        for value, sign in zip((call["self"], call["other"]), signs, strict=True)
        if isinstance(value, Value)
    ]
    return terms[0] if len(terms) == 1 else Sum(call.shape, call.where, tuple(terms))


@lipschitz_rule(*aten("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"))
def scale(call: Call) -> Value:
    """x ↦ d·x with a constant d."""
    first, second = call["self"], call["other"]
    division = call.target._schema.name.endswith("div")
    if isinstance(first, Value) and isinstance(second, Value):
        kind = "quotient" if division else "product"
        raise Refused(f"the {kind} of two values that depend on the input has no Lipschitz constant on all of ℝⁿ")
    if division and isinstance(second, Value):
        raise Refused("1/x has no Lipschitz constant near 0")
    value, constant = (first, second) if isinstance(first, Value) else (second, first)
    factor = as_tensor(constant)
    if division:
        factor = 1 / factor
    if not bool(factor.isfinite().all()):
        raise Refused("it scales by a number that is not finite")
    value = broadcast(call, value, call.shape)
    return call.apply(value, Diagonal(factor, value.ndim))


@lipschitz_rule(*aten("neg.default"))
def negate(call: Call) -> Factor:
    """-x."""
    return Diagonal(-torch.ones((), dtype=torch.float64), call.operand.ndim)


@lipschitz_rule(
    *aten(
        "pow.Tensor_Scalar",
        "square.default",
        "exp.default",
        "log.default",
        "sqrt.default",
        "rsqrt.default",
        "reciprocal.default",
        "pow.Tensor_Tensor",
    )
)
def unbounded_slope(call: Call) -> Any:
    """Only x ↦ x¹ and x⁰."""
    exponent = call.arguments.get("exponent")
    if isinstance(exponent, (int, float)) and exponent in (0, 1):
        return Diagonal(torch.full((), float(exponent), dtype=torch.float64), call.operand.ndim)
    raise Refused("its slope has no bound on ℝ")


@lipschitz_rule(*aten("maximum.default", "minimum.default", "max.other", "min.other", "fmax.default", "fmin.default"))
def extremum(call: Call) -> Value:
    """|max(a, b) - max(a', b')| ≤ max(|a - a'|, |b - b'|), entry by entry."""
    values = tuple(broadcast(call, v, call.shape) for v in (call["self"], call["other"]) if isinstance(v, Value))
    if len(values) == 1:
        return values[0]
    kind = "max" if "max" in call.target._schema.name else "min"
    return Extremum(call.shape, call.where, values, kind)


@lipschitz_rule(
    *aten("where.self", "where.ScalarOther", "where.ScalarSelf", "masked_fill.Scalar", "masked_fill.Tensor")
)
def where(call: Call) -> Value:
    """diag(mask)·x + diag(1 - mask)·y, where the mask is constant."""
    filling = "masked_fill" in call.target._schema.name
    mask = call["mask" if filling else "condition"]
    if isinstance(mask, (Value, Unusable)):
        raise Refused("its condition depends on the input, so that it may jump")
    if filling and isinstance(call["value"], Value):
        raise Refused("only a constant filling has a rule")
    keep = (~mask if filling else mask).double()
    sides = ((call["self"], keep),) if filling else ((call["self"], keep), (call["other"], 1 - keep))
    terms = []
    for value, weights in sides:
        if isinstance(value, Value):
            value = broadcast(call, value, call.shape)
            terms.append(call.apply(value, Diagonal(weights, value.ndim)))
    return terms[0] if len(terms) == 1 else Sum(call.shape, call.where, tuple(terms), disjoint=True)


@lipschitz_rule(*aten("slice_scatter.default", "select_scatter.default"))
def written_into(call: Call) -> Value:
    """A part of x replaced by y: diag(1 - mask)·x + Rᵀy, which share no entry."""
    shape = concrete(call.shape, "writing into a part of a tensor")
    where_ = {k: v for k, v in call.arguments.items() if k not in ("self", "src")}
    source = call["src"]

    def place(y: Tensor) -> Tensor:
        return call.target(y.new_zeros(shape), y, **where_)

    kept = call.target(
        torch.ones(shape, dtype=torch.float64), torch.zeros(tuple(source.shape), dtype=torch.float64), **where_
    )
    terms = []
    if isinstance(call["self"], Value):
        terms.append(call.apply(call["self"], Diagonal(kept, len(shape))))
    if isinstance(source, Value):
        terms.append(call.apply(source, Relabel(place, source.shape)))
    return terms[0] if len(terms) == 1 else Sum(call.shape, call.where, tuple(terms), disjoint=True)


@lipschitz_rule(*aten("cat.default", "concat.default", "concatenate.default"))
def concatenate(call: Call) -> Value:
    """√(Σ L_i²), joined with constants as well."""
    dim = dimension(call["dim"], len(call.shape))
    pieces = tuple(v for v in call["tensors"] if isinstance(v, Value) or v.numel() > 0)
    if len(pieces) == 1 and isinstance(pieces[0], Value):
        return pieces[0]
    pieces = tuple(p if isinstance(p, Value) else Constant(tuple(p.shape), call.where) for p in pieces)
    return Concat(call.shape, call.where, pieces, dim)


@lipschitz_rule(*aten("stack.default"))
def stack(call: Call) -> Value:
    """√(Σ L_i²)."""
    dim = dimension(call["dim"], len(call.shape))
    pieces: list[Value] = []
    for value in call["tensors"]:
        shape = (*value.shape[:dim], 1, *value.shape[dim:])
        if not isinstance(value, Value):
            pieces.append(Constant(shape, call.where))
            continue
        pieces.append(call.apply(value, Relabel(lambda x: x.unsqueeze(dim), value.shape), shape=shape))
    return Concat(call.shape, call.where, tuple(pieces), dim)


@lipschitz_rule(*aten("mean.dim", "mean.default", "sum.dim_IntList", "sum.default"))
def total(call: Call) -> Value:
    """‖1ᵀ‖ = √n over n entries, and 1/√n for the mean; in ‖·‖₁: 1 and 1/n, in ‖·‖∞: n and 1."""
    operand = call.operand
    dims = reduced_dims(call, operand)
    sizes = [n for d in dims if (n := operand.shape[d]) is not None]
    n = math.prod(sizes) if len(sizes) == len(dims) else None
    mean = "mean" in call.target._schema.name
    if n is None and not mean:
        raise Refused("the sum over a size that is not known here has no constant; use the mean, or a fixed size")
    constant = {1.0: 1.0, 2.0: math.sqrt(n or 1)}.get(float(call.ord), float(n or 1)) / (n or 1 if mean else 1)
    scale_ = (1 / n if n else 0.0) if mean else 1.0  # what a merge with other linear maps would need

    def forward(x: Tensor) -> Tensor:
        return x.sum(dims, keepdim=True) * scale_

    return reduce(call, operand, dims, constant, None if n is None else forward)


@lipschitz_rule(
    *aten("amax.default", "amin.default", "max.dim", "min.dim", "max.default", "min.default", "logsumexp.default")
)
def largest(call: Call) -> Any:
    """|max x - max y| ≤ ‖x - y‖∞ ≤ ‖x - y‖ in every norm; the gradient of logsumexp is a softmax, and sums to 1."""
    operand, name = call.operand, call.target._schema.name
    dims = reduced_dims(call, operand)
    paired = len(dims) == 1 and (operand.shape[dims[0]] or 0) > 1  # the largest and the smallest are two entries
    kind = None if "log" in name or not paired else ("max", *dims) if "max" in name else ("min", *dims)
    shape = call.shape[0] if isinstance(call.shape, list) else call.shape
    value = reduce(call, operand, dims, 1.0, None, kind, shape)
    return (
        (value, Unusable("the place of the largest entry jumps as the input changes"))
        if isinstance(call.shape, list)
        else value
    )


def reduced_dims(call: Call, operand: Value) -> list[int]:
    """The dimensions that a reduction runs over; none means all."""
    dims = call.arguments.get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(operand.ndim))
    return [dimension(d, operand.ndim) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def reduce(
    call: Call,
    operand: Value,
    dims: list[int],
    constant: float,
    forward: Any,
    kind: Any = None,
    shape: Shape | None = None,
) -> Value:
    """A reduction that keeps its dimensions, then the view that drops them."""
    constant = constant if constant in (0.0, 1.0) else math.nextafter(constant, math.inf)
    kept = tuple(1 if i in dims else n for i, n in enumerate(operand.shape))
    others = frozenset(range(operand.ndim)) - set(dims)
    block = Blockwise(constant, others, operand.ndim, forward, extremum=kind)
    value: Value = Apply(kept, call.where, block, operand)
    final = call.shape if shape is None else shape
    if len(final) == len(kept):
        return value
    return Apply(final, call.where, Relabel(lambda x: x.reshape(_known(final)), kept), value)


def broadcast(call: Call, value: Value, shape: Shape) -> Value:
    """The value as the operation sees it, after torch's broadcasting."""
    if value.shape == shape:
        return value
    target, given = concrete(shape, "broadcasting"), concrete(value.shape, "broadcasting")
    copies = math.prod(target) // max(1, math.prod(given))
    factor = Relabel(lambda x: x.expand(target), given, multiplicity=copies)
    return Apply(shape, call.where, factor, value)


def as_tensor(constant: Any) -> Tensor:
    """A constant factor in double precision."""
    if isinstance(constant, Tensor):
        return constant.detach().double()
    return torch.tensor(float(constant), dtype=torch.float64)


def _scaled(call: Call, value: Value, factor: float) -> Value:
    if factor == 1.0:
        return value
    return Apply(value.shape, call.where, Diagonal(torch.tensor(factor, dtype=torch.float64), value.ndim), value)


def _known(shape: Shape) -> tuple[int, ...]:
    return tuple(-1 if n is None else n for n in shape)
