"""Elementwise nonlinearities, and softmax and its kin, with their exact constants.

A differentiable f: ℝ → ℝ has the Lipschitz constant sup |f'|, in every ℓp norm. The constants below that are not round
numbers are the maxima of |f'|, rounded up in the twelfth digit; the tests find them again numerically.
"""

from __future__ import annotations

import math
from typing import Any

from opnorm.rules.factors import Blockwise, Diagonal, Elementwise, Factor
from opnorm.rules.registry import Call, Refused, Unusable, aten, dimension, lipschitz_rule

#: GELU: f' = Φ(x) + xφ(x) and f'' = φ(x)(2 - x²), so that the slope is largest at x = √2.
GELU = 1.128904145186
GELU_TANH = 1.128993068659  # its approximation by tanh is a little steeper, at x = 1.4185
SILU = 1.099839320129  # x·sigmoid(x), at x = 2.3994
MISH = 1.088498161252  # x·tanh(softplus(x)), at x = 1.4906
HARDSIGMOID = 0.166666671634  # 1/6; torch's derivative has it in single precision, and is covered too
ERF = 1.128379167096  # 2/√π, at 0

_SLOPES = {
    1.0: aten(
        "relu.default", "relu6.default", "tanh.default", "log_sigmoid.default", "abs.default",
        "sin.default", "cos.default", "atan.default", "asinh.default", "softshrink.default", "hardtanh.default",
        "clamp_min.default", "clamp_max.default", "clamp.default",
    ),
    0.25: aten("sigmoid.default"),
    HARDSIGMOID: aten("hardsigmoid.default"),
    1.5: aten("hardswish.default"),
    SILU: aten("silu.default"),
    MISH: aten("mish.default"),
    ERF: aten("erf.default"),
}  # fmt: skip


def _register(constant: float, operations: tuple[Any, ...]) -> None:
    @lipschitz_rule(*operations)
    def elementwise(call: Call) -> Factor:
        return Elementwise(constant, call.operand.ndim)


for _constant, _operations in _SLOPES.items():
    _register(_constant, _operations)


@lipschitz_rule(*aten("gelu.default"))
def gelu(call: Call) -> Factor:
    """sup |f'| at x = √2, or a little more for the approximation by tanh."""
    return Elementwise(GELU if call["approximate"] == "none" else GELU_TANH, call.operand.ndim)


@lipschitz_rule(*aten("leaky_relu.default"))
def leaky_relu(call: Call) -> Factor:
    """max(1, |slope|)."""
    return Elementwise(max(1.0, abs(float(call["negative_slope"]))), call.operand.ndim)


@lipschitz_rule(*aten("rrelu.default"))
def rrelu(call: Call) -> Factor:
    """A leaky ReLU with the mean slope, in eval mode."""
    if call["training"]:
        raise Refused("it is random in training mode; certify model.eval()")
    return Elementwise(max(1.0, abs(float(call["lower"]) + float(call["upper"])) / 2), call.operand.ndim)


@lipschitz_rule(*aten("prelu.default", "_prelu_kernel.default"))
def prelu(call: Call) -> Factor:
    """max(1, |a_c|), a number a channel."""
    operand, slopes = call.only("self"), call["weight"].detach().double().abs().clamp(min=1)
    if slopes.dim() <= 1 and slopes.numel() > 1:
        slopes = slopes.reshape(1, -1, *(1,) * (operand.ndim - 2))
    return Diagonal(slopes.reshape((1,) * operand.ndim) if slopes.numel() == 1 else slopes, operand.ndim, linear=False)


@lipschitz_rule(*aten("elu.default"))
def elu(call: Call) -> Factor:
    """scale·max(1, |alpha·input_scale|): the slope is scale above 0, at most scale·alpha·input_scale below."""
    alpha, scale, inner = (float(call[name]) for name in ("alpha", "scale", "input_scale"))
    if inner < 0:
        raise Refused("its slope is not bounded for a negative input_scale")
    return Elementwise(abs(scale) * max(1.0, abs(alpha * inner)), call.operand.ndim)


@lipschitz_rule(*aten("selu.default"))
def selu(call: Call) -> Factor:
    """scale·alpha = 1.7581, the slope at 0 from below."""
    return Elementwise(
        math.nextafter(1.0507009873554804934193349852946 * 1.6732632423543772848170429916717, 2.0), call.operand.ndim
    )


@lipschitz_rule(*aten("celu.default"))
def celu(call: Call) -> Factor:
    """1: the slope below 0 is exp(x/alpha), of which torch's derivative has 1/alpha in single precision."""
    if float(call["alpha"]) <= 0:
        raise Refused("its slope is not bounded for alpha ≤ 0")
    return Elementwise(1.0 + 2.0**-22, call.operand.ndim)


@lipschitz_rule(*aten("softplus.default"))
def softplus(call: Call) -> Factor:
    """1; torch goes over to x where beta·x exceeds the threshold, by a jump that is below 2.1e-9/|beta| from 20 on."""
    if not float(call["threshold"]) >= 20:
        raise Refused("it jumps where it goes over to the identity, at beta·x = threshold; leave the threshold at 20")
    return Elementwise(1.0, call.operand.ndim)


@lipschitz_rule(*aten("threshold.default"))
def threshold(call: Call) -> Factor:
    """1 where it is continuous."""
    if float(call["threshold"]) != float(call["value"]):
        raise Refused("it jumps at the threshold, so that it has no Lipschitz constant")
    return Elementwise(1.0, call.operand.ndim)


@lipschitz_rule(*aten("softmax.int", "_softmax.default", "_safe_softmax.default"))
def softmax(call: Call) -> Factor:
    """½ in every norm: row i of J = diag(p) - ppᵀ has the absolute sum 2p_i(1-p_i) ≤ ½, and J is symmetric."""
    dim = dimension(call["dim"], call.operand.ndim)
    return _along(call, dim, 0.0 if call.operand.shape[dim] == 1 else 0.5)


@lipschitz_rule(*aten("log_softmax.int", "_log_softmax.default"))
def log_softmax(call: Call) -> Factor:
    """√n: ‖I - 1pᵀ‖ is convex in p and largest at p = e_i, where JJᵀ is I + 11ᵀ on n-1 rows; ‖·‖₁: n-1, ‖·‖∞: 2."""
    dim = dimension(call["dim"], call.operand.ndim)
    n = call.operand.shape[dim]
    if n == 1:
        return _along(call, dim, 0.0)
    if n is None:
        raise Refused("its constant grows with the number of classes, which is not known here")
    return _along(
        call, dim, {1.0: max(1.0, n - 1.0), 2.0: math.nextafter(math.sqrt(n), math.inf)}.get(float(call.ord), 2.0)
    )


@lipschitz_rule(*aten("sort.default", "sort.stable"))
def sort(call: Call) -> tuple[Any, Any]:
    """1 in every norm: of all pairings of two lists, the sorted one has the smallest distance."""
    operand = call.only("self")
    dim = dimension(call["dim"], operand.ndim)
    return call.apply(operand, _along(call, dim, 1.0), shape=call.shape[0]), Unusable(
        "the order of the entries jumps as the input changes"
    )


def _along(call: Call, dim: int, constant: float) -> Blockwise:
    others = frozenset(range(call.operand.ndim)) - {dim}
    return Blockwise(constant, others, call.operand.ndim)
