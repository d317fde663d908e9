"""Convolutions, linear layers, batch norm in eval mode: linear maps with weights, and the norms that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator
from opnorm.rules.expression import Value
from opnorm.rules.factors import Blockwise, Convolution, Depthwise, Diagonal, Factor, Matrix
from opnorm.rules.registry import Call, Refused, aten, lipschitz_rule


@lipschitz_rule(*aten("conv1d.default", "conv2d.default", "conv3d.default"))
def convolution(call: Call) -> Value:
    """‖K‖ on the real input size."""
    return _convolve(call, padding=call["padding"])


@lipschitz_rule(*aten("conv1d.padding", "conv2d.padding", "conv3d.padding"))
def named_convolution(call: Call) -> Value:
    """‖K‖ with padding "same" or "valid"."""
    return _convolve(call, padding=call["padding"])


@lipschitz_rule(*aten("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"))
def transposed_convolution(call: Call) -> Value:
    """‖Kᵀ‖ = ‖K‖, of the convolution that it is the adjoint of."""
    return _convolve(call, padding=call["padding"], transposed=True, output_padding=call["output_padding"])


@lipschitz_rule(*aten("convolution.default"))
def any_convolution(call: Call) -> Value:
    """The general form that decompositions arrive at."""
    extra = {"transposed": True, "output_padding": call["output_padding"]} if call["transposed"] else {}
    return _convolve(call, padding=call["padding"], **extra)


def _convolve(call: Call, padding: Any, **extra: Any) -> Value:
    operand, weight = call.only("input"), call["weight"].detach().double()
    dim = weight.dim() - 2
    if operand.ndim != dim + 2:
        raise Refused(f"its input has {operand.ndim} dimensions; give the model a batch dimension")
    groups, transposed = int(call["groups"]), bool(extra.get("transposed", False))
    columns = weight.shape[1] * groups
    channels = (weight.shape[0], columns) if transposed else (columns, weight.shape[0])
    geometry = ConvGeometry(
        channels[0], channels[1], tuple(weight.shape[2:]), operand.shape[2:],
        stride=_spread(call["stride"], dim), padding=padding if isinstance(padding, str) else _spread(padding, dim),
        dilation=_spread(call["dilation"], dim), groups=groups, transposed=transposed,
        output_padding=_spread(extra.get("output_padding", 0), dim),
    )  # fmt: skip
    return call.apply(operand, convolution_factor(ConvOperator(geometry, weight)))


def convolution_factor(operator: ConvOperator) -> Factor:
    """The factor of a convolution: `Depthwise` where every channel is on its own."""
    g = operator.geometry
    alone = g.dim > 0 and g.groups == g.in_channels == g.out_channels
    return Depthwise(operator) if alone else Convolution(operator)


@lipschitz_rule(*aten("linear.default"))
def linear(call: Call) -> Value:
    """‖W‖₂, the same at every position."""
    operand = call.only("input")
    return call.apply(operand, Matrix(_matrix(call["weight"]), operand.ndim - 1))


@lipschitz_rule(*aten("addmm.default", "addbmm.default", "baddbmm.default"))
def addmm(call: Call) -> Value:
    """A bias and a matrix product."""
    if call.target is not torch.ops.aten.addmm.default or call.operand is not call["mat1"]:
        raise Refused("only addmm(bias, input, weight) has a rule")
    return call.apply(call.operand, Matrix(float(call["alpha"]) * _matrix(call["mat2"]).T, 1))


@lipschitz_rule(*aten("matmul.default", "mm.default"))
def matmul(call: Call) -> Value:
    """x ↦ xW or Wx with a constant matrix W."""
    names = ("self", "other") if "other" in call.arguments else ("self", "mat2")
    first, second = call[names[0]], call[names[1]]
    if isinstance(first, Value) and isinstance(second, Value):
        raise Refused("a product of two values that depend on the input (attention, for one) is not Lipschitz")
    operand = call.operand
    if operand is first and second.dim() == 2:
        return call.apply(operand, Matrix(_matrix(second).T, operand.ndim - 1))
    if operand is second and first.dim() == 2 and operand.ndim >= 2:
        return call.apply(operand, Matrix(_matrix(first), operand.ndim - 2))
    raise Refused("only a product with a constant matrix of two dimensions has a rule")


@lipschitz_rule(
    *aten("bmm.default", "baddbmm.out", "scaled_dot_product_attention.default", "_native_multi_head_attention.default")
)
def attention(call: Call) -> Value:
    """Not Lipschitz on ℝⁿ."""
    if len(call.values) == 1:
        raise Refused("only a product with a constant matrix of two dimensions has a rule")
    raise Refused("a product of two values that depend on the input (attention, for one) is not Lipschitz")


@lipschitz_rule(*aten("batch_norm.default", "native_batch_norm.default", "cudnn_batch_norm.default"))
def batch_norm(call: Call) -> Factor:
    """diag(γ/√(σ² + ε)) in eval mode."""
    training = call.arguments.get("training", call.arguments.get("train"))
    mean, variance = call["running_mean"], call["running_var"]
    if training or mean is None or variance is None:
        raise Refused(
            "it normalises by statistics of its input, and so has no Lipschitz constant; certify model.eval(), with "
            "track_running_stats=True"
        )
    return _normalising_diagonal(call)


@lipschitz_rule(*aten("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default"))
def batch_norm_in_eval(call: Call) -> tuple[Value, ...]:
    """The form that torch.export gives it."""
    return (call.apply(call.operand, _normalising_diagonal(call), shape=call.shape[0]),)


def _normalising_diagonal(call: Call) -> Diagonal:
    operand, variance = call.operand, call["running_var"]
    values = 1 / (variance.detach().double() + float(call["eps"])).sqrt()
    if call["weight"] is not None:
        values = values * call["weight"].detach().double()
    return Diagonal(values.reshape(1, -1, *(1,) * (operand.ndim - 2)), operand.ndim)


@lipschitz_rule(*aten(
    "group_norm.default", "native_group_norm.default", "layer_norm.default", "native_layer_norm.default",
    "instance_norm.default", "rms_norm.default", "_fused_rms_norm.default", "native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
))  # fmt: skip
def statistics_of_the_input(call: Call) -> Value:
    """‖J‖ grows like 1/√(variance of the input), without bound but for ε."""
    raise Refused(
        "it divides by the standard deviation of its own input: its slope there is up to 1/√ε, which makes any bound "
        "useless; use batch norm, or none"
    )


@lipschitz_rule(
    *aten(
        "dropout.default",
        "alpha_dropout.default",
        "feature_dropout.default",
        "feature_alpha_dropout.default",
        "native_dropout.default",
    )
)
def dropout(call: Call) -> Any:
    """The identity in eval mode."""
    training = call.arguments.get("train", False)
    if training and float(call["p"]) > 0:
        raise Refused("it is random in training mode; certify model.eval()")
    return (call.operand, call.operand) if isinstance(call.shape, list) else call.operand


@lipschitz_rule(*aten("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar"))
def vector_norm(call: Call) -> Factor:
    """|‖x‖ - ‖y‖| ≤ ‖x - y‖, where it is the norm that the certificate is in."""
    order = call.arguments.get("ord", call.arguments.get("p"))
    if (order is not None and float(order) != float(call.ord)) or call.arguments.get("dim") is not None:
        raise Refused("only the norm of the whole tensor, in the norm of the certificate, has a rule")
    return Blockwise(1.0, frozenset(), call.operand.ndim)


def _matrix(weight: Tensor) -> Tensor:
    if weight.dim() != 2:
        raise Refused(f"its weight has {weight.dim()} dimensions; only matrices have a rule")
    return weight.detach().double()


def _spread(value: Any, dim: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dim if len(values) == 1 else values
