"""`operator_norm`, `conv_norm`, `joint_norm`: the norm of an operator, of a weight, of a depthwise–pointwise pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Guarantee, Method, NormBound, rounded_up
from opnorm.geometry import ConvGeometry, Size
from opnorm.norms.exact import Exact, group_size
from opnorm.norms.fourier import FourierBound
from opnorm.norms.induced import induced_norm
from opnorm.norms.power import PowerIteration
from opnorm.norms.refine import worth_refining
from opnorm.operator import ConvOperator

_GUARANTEES = (None, "exact", "upper", "lower")


def operator_norm(
    operator: ConvOperator,
    method: Method | str = "auto",
    *,
    ord: float = 2,
    guarantee: Guarantee | None = None,
    state: Any = None,
) -> NormBound:
    """‖K‖, the operator norm of a layer, with what is guaranteed of the value.

    Args:
        operator: the layer.
        method: a method, or `"auto"`: `auto(geometry, guarantee)` picks one, and the result says which.
        ord: 2; or 1 or `math.inf` for the induced 1- and ∞-norms, which are exact and need no method.
        guarantee: `"exact"`, `"upper"` or `"lower"`: what the value has to satisfy. An exact value satisfies all three.
        state: the `state` of an earlier result, for a warm start.

    Examples:
        >>> geometry = ConvGeometry(8, 8, 3, (14, 14), stride=2, padding=1, groups=8)
        >>> operator_norm(ConvOperator(geometry, torch.randn(8, 1, 3, 3))).guarantee
        'upper'
    """
    _require_operator(operator)
    if guarantee not in _GUARANTEES:
        raise ValueError(
            f"expected guarantee in {_GUARANTEES}, got {guarantee!r}; leave it out to take what the method gives"
        )
    with torch.autocast(operator.weight.device.type, enabled=False):
        if ord != 2:
            return _finite(_induced(operator, ord), operator)
        chosen = _chosen(operator.geometry, method, guarantee)
        reason = chosen.why_not(operator.geometry)
        if reason:
            raise ValueError(reason)
        try:
            result = _finite(chosen.compute(operator, state), operator)
        except torch.linalg.LinAlgError:  # eigenvalue solvers fail on NaN, each in its own words
            _require_finite_weights(operator)
            raise
    if not result.satisfies(guarantee):
        raise ValueError(
            f"expected a value that is {guarantee!r}, got one that is {result.guarantee!r} from {chosen} for "
            f"{operator.geometry}; use method='auto', which picks by guarantee"
        )
    return result


def auto(geometry: ConvGeometry, guarantee: Guarantee | None = None) -> Method:
    """The method that `operator_norm` picks: never a lower bound unless one is asked for."""
    if guarantee == "lower":
        return Exact() if geometry.is_matrix else PowerIteration()
    if geometry.is_matrix:
        large = min(geometry.weight_shape[:2]) > 4096 and guarantee != "exact"
        return PowerIteration(eps=1e-3, prove=True) if large else Exact()
    if guarantee == "exact":
        fourier = FourierBound()
        return fourier if fourier.is_exact(geometry) else Exact()
    dense = geometry.kind in ("dense", "grouped")  # a matrix at every frequency: there a smaller grid is worth 0.1 %
    method = FourierBound(tolerance=1e-3 if dense else 1e-4)
    return replace(method, refine=worth_refining(geometry, method.grids(geometry)))


def conv_norm(
    weight: Tensor,
    input_size: Size,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] | Sequence[tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    method: Method | str = "auto",
    guarantee: Guarantee | None = None,
    ord: float = 2,
) -> Tensor:
    """‖K‖ of the convolution with this weight, differentiable, in one line; a 2-dimensional weight is a linear layer.

    The arguments are those of `ConvGeometry` and `operator_norm`. The result is 0-dimensional, in at least float32.

    Examples:
        >>> weight = torch.randn(16, 1, 3, 3, requires_grad=True)
        >>> conv_norm(weight, (28, 28), padding=1, groups=16).backward()
    """
    if not isinstance(weight, Tensor) or not 2 <= weight.dim() <= 5:
        got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"expected a weight of 2 (linear) to 5 (3-D) dimensions, got {got}; pass module.weight")
    channels = weight.shape[0], weight.shape[1] * groups
    geometry = ConvGeometry(
        *(channels if transposed else channels[::-1]),
        tuple(weight.shape[2:]),
        input_size if weight.dim() > 2 else (),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=padding_mode,
        transposed=transposed,
        output_padding=output_padding,
    )
    return operator_norm(ConvOperator(geometry, weight), method, guarantee=guarantee, ord=ord).value


def joint_norm(depthwise: ConvOperator, pointwise: ConvOperator, *, scale: Tensor | None = None) -> NormBound:
    """‖PW∘S∘DW‖ ≤ ‖Θ·diag(|s|·d)‖₂, with d_j the norm of channel j of the depthwise layer and S a scaling by channel.

    Never more than the product of the two values of `operator_norm`, at the same cost: a strong channel that the
    pointwise layer hardly reads no longer counts in full. A batch norm in inference form between the two is such an S.
    Not differentiable.

    Args:
        depthwise: one input and one output channel a group.
        pointwise: a 1×1 convolution, or a linear layer, on the channels of `depthwise`.
        scale: (channels,), what the channels are multiplied by in between.
    """
    _require_operator(depthwise)
    _require_operator(pointwise)
    dw, pw = depthwise.geometry, pointwise.geometry
    if dw.weight_shape[:2] != (dw.groups, 1):
        raise ValueError(f"expected a depthwise layer with one output a channel first, got {dw}; take their product")
    if not pw.is_matrix or pw.in_channels != dw.out_channels:
        raise ValueError(
            f"expected a pointwise layer of {dw.out_channels} input channels second, got {pw}; take their product"
        )
    if scale is not None and scale.shape != (dw.out_channels,):
        raise ValueError(
            f"expected a scale of shape ({dw.out_channels},), got {tuple(scale.shape)}; give a factor for each channel"
        )
    all_are_small = dw.has_size and group_size(dw) <= 64
    refine = dw.groups if all_are_small else worth_refining(dw, FourierBound().grids(dw))
    every_channel = FourierBound(finalists=None, refine=refine)
    first = operator_norm(depthwise.detach(), every_channel, guarantee="upper")
    assert first.per_channel is not None
    channels = first.per_channel.double() * (1.0 if scale is None else scale.detach().abs().double())
    matrix = pointwise.weight.detach().flatten(1).double()
    joint = (matrix.mT if pw.transposed else matrix) * channels
    norm = operator_norm(ConvOperator(ConvGeometry(pw.in_channels, pw.out_channels, (), ()), joint), guarantee="upper")
    dtype = torch.promote_types(pointwise.weight.dtype, torch.float32)
    return NormBound(rounded_up(norm.value, dtype), "upper", Joint(first.method, norm.method))


@dataclass(frozen=True)
class Joint(Method):
    """‖Θ·diag(d)‖₂, the bound of `joint_norm`; it takes two operators, and is named in results only."""

    depthwise: Method
    pointwise: Method

    guarantee = "upper"
    source = "this library"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return "Joint takes two layers; call joint_norm(depthwise, pointwise)"

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        raise ValueError(self.why_not(operator.geometry))


@dataclass(frozen=True)
class Induced(Method):
    """‖K‖_∞ or ‖K‖_1: the largest sum of absolute entries of a row, or of a column, at the worst position."""

    ord: float

    guarantee = "exact"
    source = "the definition"

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return None

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        geometry = operator.geometry
        value = induced_norm(operator, rows=self.ord == math.inf)
        return NormBound(value, "exact" if geometry.has_size else "upper", self)


def _induced(operator: ConvOperator, ord: float) -> NormBound:
    if ord not in (1, math.inf):
        raise ValueError(f"expected ord as 1, 2 or math.inf, got {ord!r}; no other norm is implemented")
    return Induced(ord).compute(operator)


def _chosen(geometry: ConvGeometry, method: Method | str, guarantee: Guarantee | None) -> Method:
    if isinstance(method, Method):
        return method
    if method != "auto":
        raise ValueError(f"expected method='auto' or a method such as FourierBound(), got {method!r}")
    return auto(geometry, guarantee)


def _require_operator(operator: Any) -> None:
    if not isinstance(operator, ConvOperator):
        raise ValueError(
            f"expected a ConvOperator, got {type(operator).__name__}; use conv_norm(weight, input_size) for a weight, "
            "and operators_of(model, input_shape) for a model"
        )


def _finite(result: NormBound, operator: ConvOperator) -> NormBound:
    """Raise unless the norm is finite, and the weight too: a published method may pass over a NaN in silence."""
    if torch.compiler.is_compiling() or torch.isfinite(result.value) & torch.isfinite(operator.weight).all():
        return result
    _require_finite_weights(operator)
    raise ValueError(
        f"expected a norm within the range of its dtype, got {float(result)} for {operator.geometry}; "
        "look for a diverged training step"
    )


def _require_finite_weights(operator: ConvOperator) -> None:
    if not torch.isfinite(operator.weight).all():
        raise ValueError(
            f"expected finite weights, got NaN or infinite ones for {operator.geometry}; "
            "look for a diverged training step"
        )
