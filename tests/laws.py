"""What every method owes, as functions of (method, operator): a new method is tested by one line in test_laws.METHODS.

Each returns whether there was something to check, so that a test can count and cannot pass by checking nothing.
`rtol` is how well two computations of the same norm agree; iterations that stop early need more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from opnorm.bound import Method, NormBound
from opnorm.geometry import ConvGeometry
from opnorm.norms.functional import operator_norm
from opnorm.operator import ConvOperator

Law = Callable[..., bool]
UPPER, LOWER = ("exact", "upper"), ("exact", "lower")
FLOAT32 = 1e-5  # what is rounding in float32, for values that promise nothing on this side


# The truth, and operators whose norm follows from that of another


@cache
def truth(operator: ConvOperator) -> float:
    """‖K‖ by dense SVD in float64 on the CPU, once for each operator."""
    exact = ConvOperator(operator.geometry, operator.weight.detach().to("cpu", torch.float64))
    return float(torch.linalg.svdvals(exact.to_dense())[0])


def scaled(operator: ConvOperator, factor: float) -> ConvOperator:
    """cK."""
    return ConvOperator(operator.geometry, factor * operator.weight)


def groups_of(operator: ConvOperator) -> list[ConvOperator]:
    """Each group as an operator of its own."""
    g = operator.geometry
    one = changed(g, in_channels=g.in_channels // g.groups, out_channels=g.out_channels // g.groups, groups=1)
    return [ConvOperator(one, weight) for weight in operator.weight.chunk(g.groups)]


def adjoint(operator: ConvOperator) -> ConvOperator | None:
    """Kᵀ as a layer; None where padding other than with zeros has no such layer."""
    g = operator.geometry
    if g.dim == 0:
        return ConvOperator(ConvGeometry(g.out_channels, g.in_channels, (), ()), operator.weight.T)
    if g.padding_mode != "zeros":
        return None
    exchanged = {"in_channels": g.out_channels, "out_channels": g.in_channels, "input_size": g.output_size}
    rest = tuple(0 for _ in g.stride)
    if not g.transposed:  # inputs at the end that no output reads
        rest = tuple((a.inputs + a.before + a.after - a.extent) % a.stride for a in g.axes)  # type: ignore[operator]
    other = changed(g, transposed=not g.transposed, output_padding=rest, **exchanged)
    if other.output_size != g.input_size:  # an output padding beyond the stride, which no convolution has for adjoint
        return None
    return ConvOperator(other, operator.weight)


def channels_permuted(operator: ConvOperator) -> ConvOperator:
    """PKQ for permutations P of outputs and Q of inputs that keep the groups together."""
    g, w = operator.geometry, operator.weight
    grouped = w.reshape(g.groups, -1, *w.shape[1:])
    for dim in range(3):
        grouped = grouped.index_select(dim, _permutation(grouped.shape[dim]).to(w.device))
    return ConvOperator(g, grouped.reshape(w.shape))


def axes_reversed(operator: ConvOperator) -> ConvOperator:
    """The same layer on images of which the axes are exchanged: width for height."""
    g = operator.geometry
    names = ("kernel_size", "input_size", "stride", "padding", "dilation", "output_padding")
    order = (0, 1, *reversed(range(2, operator.weight.dim())))
    reverse = {name: getattr(g, name)[::-1] for name in names}
    return ConvOperator(changed(g, **reverse), operator.weight.permute(order))


def changed(geometry: ConvGeometry, **changes: object) -> ConvGeometry:
    """The same geometry but for some arguments."""
    return ConvGeometry(**({f.name: getattr(geometry, f.name) for f in fields(geometry)} | changes))  # type: ignore[arg-type]


def _permutation(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def _agrees(value: float, expected: float, rtol: float) -> bool:
    return abs(value - expected) <= rtol * max(abs(value), abs(expected))


def _dominates(bound: NormBound, norm: float, exact: float = 1e-9, rounding: float = 1e-12) -> None:
    value = float(bound.value)
    if bound.guarantee in UPPER:
        assert value >= norm * (1 - 1e-12), f"{value} is no upper bound of {norm}: relative {value / norm - 1:.3e}"
    if bound.guarantee in LOWER:
        assert value <= norm * (1 + (exact if bound.guarantee == "exact" else rounding)), (
            f"{value} is {bound.guarantee}, and above {norm}: relative {value / norm - 1 if norm else math.inf:.3e}"
        )


# The laws


def domination(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """upper ≥ ‖K‖, lower ≤ ‖K‖, exact = ‖K‖ to 1e-9; and a finite value where nothing is promised."""
    bound = operator_norm(operator, method)
    assert bound.value.shape == ()
    assert bound.value.dtype == operator.weight.dtype
    assert bound.value.device == operator.weight.device
    assert bound.method == method
    assert math.isfinite(float(bound))
    assert float(bound) >= 0
    if method.guarantee != "none":
        assert bound.satisfies(method.guarantee), f"a method that is {method.guarantee} returned {bound.guarantee}"
    value = float(bound)
    if bound.guarantee == "exact":
        assert _agrees(value, truth(operator), 1e-9), f"{value} is not {truth(operator)}"
    _dominates(bound, truth(operator))
    return True


def domination_in_float32(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """In float32 an upper bound is still ≥ ‖K‖ of that float32 weight, computed in float64."""
    rounded = float32(operator)
    bound = operator_norm(rounded, method)
    assert bound.value.dtype == torch.float32
    _dominates(bound, truth(rounded), FLOAT32, FLOAT32)
    return True


@cache
def float32(operator: ConvOperator) -> ConvOperator:
    """The operator in float32, the same object at every call, so that its truth is computed once."""
    return operator.to(torch.float32)


def domination_in_half_precision(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """bfloat16 and float16 weights are computed in at least float32."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = operator.to(dtype)
        if rounded.weight.isfinite().all():
            bound = operator_norm(rounded, method)
            assert bound.value.dtype == torch.float32
            _dominates(bound, truth(rounded), FLOAT32, FLOAT32)
    return True


def homogeneity(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """bound(cW) = |c| bound(W)."""
    one = float(operator_norm(operator, method))
    for factor in (-1.0, 3.7, 2.0**-20, 1e-10, -1e10):
        value = float(operator_norm(scaled(operator, factor), method))
        assert _agrees(value, abs(factor) * one, rtol), f"{value} for {factor} times an operator of bound {one}"
    return True


def group_maximum(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """The norm of a grouped layer is the largest of its groups' norms, never their product."""
    parts = groups_of(operator)
    if len(parts) == 1 or not method.supports(parts[0].geometry):
        return False
    whole, alone = operator_norm(operator, method), [float(operator_norm(part, method)) for part in parts]
    assert _agrees(float(whole), max(alone), rtol), f"{float(whole)} for groups of {alone}"
    return True


def channel_permutation(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """Renaming channels changes nothing."""
    value, other = (float(operator_norm(k, method)) for k in (operator, channels_permuted(operator)))
    assert _agrees(value, other, rtol), f"{value}, with channels permuted {other}"
    return True


def axis_exchange(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """Height and width have equal rights."""
    other = axes_reversed(operator)
    if operator.geometry.dim < 2 or not method.supports(other.geometry):
        return False
    value, exchanged = (float(operator_norm(k, method)) for k in (operator, other))
    assert _agrees(value, exchanged, rtol), f"{value}, with axes exchanged {exchanged}"
    return True


def transposition(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """‖Kᵀ‖ = ‖K‖, of a convolution and its transposed convolution."""
    other = adjoint(operator)
    if other is None or not method.supports(other.geometry):
        return False
    value, transposed = (float(operator_norm(k, method)) for k in (operator, other))
    assert _agrees(value, transposed, rtol), f"{value}, of the adjoint {transposed}"
    return True


def zero_kernel(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """‖0‖ = 0, neither NaN nor 1, and with a finite gradient."""
    weight = torch.zeros_like(operator.weight).requires_grad_()
    bound = operator_norm(ConvOperator(operator.geometry, weight), method)
    assert float(bound) == 0
    if bound.per_channel is not None:
        assert not bound.per_channel.any()
    if bound.value.requires_grad:
        (gradient,) = torch.autograd.grad(bound.value, weight)
        assert gradient.isfinite().all()
    return True


def determinism(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """The same bits twice, whatever the global random numbers, which are left alone; and the weight too."""
    before = operator.weight.clone()
    torch.manual_seed(1)
    first = operator_norm(operator, method).value
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state()), "the global random numbers were used"
    torch.manual_seed(2)
    assert torch.equal(first, operator_norm(operator, method).value)
    assert torch.equal(before, operator.weight)
    return True


def gradient_of_a_norm(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """⟨∇bound(W), W⟩ = bound(W), as bound(cW) = c bound(W) implies, at kinks too; the value is what it is without."""
    weight = operator.weight.clone().requires_grad_()
    bound = operator_norm(ConvOperator(operator.geometry, weight), method)
    if not bound.value.requires_grad:
        return False
    assert _agrees(float(bound.value.detach()), float(operator_norm(operator, method)), min(rtol, 1e-9))
    (gradient,) = torch.autograd.grad(bound.value, weight)
    assert gradient.isfinite().all()
    assert _agrees(float((gradient * operator.weight).sum()), float(bound.value.detach()), max(rtol, 1e-9))
    return True


def finite_differences(method: Method, operator: ConvOperator, rtol: float = 1e-9) -> bool:
    """The gradient is that of finite differences, in a random direction; away from ties of the maximum."""
    generator = torch.Generator().manual_seed(operator.weight.numel())
    noise = torch.randn(2, *operator.weight.shape, generator=generator, dtype=torch.float64).to(operator.weight)
    unit = operator.weight / operator.weight.abs().max().clamp_min(1e-300)
    weight = (unit + 0.3 * noise[0]).requires_grad_()

    def value(at: Tensor) -> Tensor:
        return operator_norm(ConvOperator(operator.geometry, at), method).value

    start = value(weight)
    if not start.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(start, weight)
    step = 1e-6 * noise[1]
    with torch.no_grad():
        difference = float(value(weight + step) - value(weight - step)) / 2
    slope = float((gradient * step).sum())
    allowed = max(math.sqrt(rtol), 1e-4) * float(gradient.norm() * step.norm())
    assert abs(difference - slope) <= allowed, f"finite difference {difference:.6e}, gradient {slope:.6e}"
    return True


def channels_of_the_maximum(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """value = max per_channel, one for each group."""
    bound = operator_norm(operator, method)
    if bound.per_channel is None:
        return False
    assert bound.per_channel.shape == (operator.geometry.groups,)
    assert _agrees(float(bound.per_channel.max()), float(bound), 1e-12)
    if bound.guarantee != "none":
        for value, part in zip(bound.per_channel, groups_of(operator), strict=True):
            _dominates(replace(bound, value=value), truth(part))
    return True


def warm_start(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """A state handed back keeps every guarantee, on the same weight and on another one, and helps an iteration."""
    cold = operator_norm(operator, method)
    warm = operator_norm(operator, method, state=cold.state)
    assert warm.guarantee == cold.guarantee
    _dominates(warm, truth(operator))
    if cold.state is None:
        assert float(warm) == float(cold)
        return False
    if cold.guarantee == "lower":
        assert float(warm) >= float(cold) * (1 - 1e-9), f"cold {float(cold)}, warm {float(warm)}"
    noise = torch.randn(operator.weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = ConvOperator(operator.geometry, noise.to(operator.weight))
    _dominates(operator_norm(other, method, state=warm.state), truth(other))
    zero = ConvOperator(operator.geometry, torch.zeros_like(operator.weight))
    after = operator_norm(zero, method, state=warm.state)
    assert float(after) == 0
    _dominates(operator_norm(operator, method, state=after.state), truth(operator))
    return True


def every_size(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """A bound for any input size is a bound for this one."""
    anywhere = operator.geometry.at(None)
    if operator.geometry.dim == 0 or not method.supports(anywhere):
        return False
    bound = operator_norm(ConvOperator(anywhere, operator.weight), method)
    if bound.guarantee in UPPER:
        _dominates(replace(bound, guarantee="upper"), truth(operator))
    return bound.guarantee in UPPER


def guarantee_on_request(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """A guarantee that is asked for is given, or refused by name; never a lower bound in place of an upper one."""
    plain = operator_norm(operator, method)
    for guarantee in ("exact", "upper", "lower"):
        if plain.satisfies(guarantee):
            asked = operator_norm(operator, method, guarantee=guarantee)
            assert asked.satisfies(guarantee)
            assert float(asked) == float(plain)
        else:
            with pytest.raises(ValueError, match=rf"expected .*{guarantee}.* got .*; "):
                operator_norm(operator, method, guarantee=guarantee)
    return True


def frozen_configuration(method: Method, operator: ConvOperator, rtol: float = 0) -> bool:
    """A method is a value: equal, hashable, printable, and not to be changed by what it computes."""
    before = repr(method)
    operator_norm(operator, method)
    assert repr(method) == before
    assert replace(method) == method  # type: ignore[type-var]
    assert hash(replace(method)) == hash(method)  # type: ignore[type-var]
    with pytest.raises(FrozenInstanceError):
        method.anything = 1  # type: ignore[attr-defined]
    return True


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        homogeneity,
        group_maximum,
        channel_permutation,
        axis_exchange,
        transposition,
        zero_kernel,
        domination_in_half_precision,
        determinism,
        gradient_of_a_norm,
        finite_differences,
        channels_of_the_maximum,
        warm_start,
        every_size,
        guarantee_on_request,
        frozen_configuration,
    )
}


def monotone(methods: list[Method], operator: ConvOperator, growing: bool) -> bool:
    """More steps of an iteration bring it nearer: a lower bound grows, an upper bound decreases."""
    values = [float(operator_norm(operator, method)) for method in methods]
    signs = [1 if growing else -1] * (len(values) - 1)
    for sign, before, after in zip(signs, values[:-1], values[1:], strict=True):
        assert sign * (after - before) >= -1e-12 * before, f"{values} is not {'growing' if growing else 'decreasing'}"
    return True
