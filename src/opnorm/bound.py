"""`NormBound`, what a method returns, and `Method`, what every method is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator

Guarantee = Literal["exact", "upper", "lower", "none"]
_EXPONENT = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}  # where its bits are
_ACCEPTED = {
    "exact": ("exact",),
    "upper": ("exact", "upper"),
    "lower": ("exact", "lower"),
    None: ("exact", "upper", "lower", "none"),
}


@dataclass(frozen=True, eq=False)
class NormBound:
    """A norm and what is known of it: torch returns a bare number and leaves you to guess on which side it lies.

    Attributes:
        value: the norm, a 0-dim tensor, differentiable where the method is.
        guarantee: `"exact"` (to rounding), `"upper"` (never below the norm), `"lower"` (never above it) or `"none"`.
        method: the method that computed it, with its settings.
        state: what to hand to the next call for a warm start; None where the method keeps nothing.
        per_channel: the same for each channel or group alone, where the method finds it.
    """

    value: Tensor
    guarantee: Guarantee
    method: Method
    state: Any = None
    per_channel: Tensor | None = field(default=None, repr=False)

    def __float__(self) -> float:
        return float(self.value.detach())

    def satisfies(self, guarantee: Guarantee | None) -> bool:
        """Whether this may stand where `guarantee` is asked for; an exact value may stand for either side."""
        return self.guarantee in _ACCEPTED[guarantee]


class Method(ABC):
    """A way to compute a norm: a frozen configuration, without tensors; what it remembers is passed in and handed back.

    Attributes:
        guarantee: what holds for every geometry that the method supports. A `NormBound` may be stronger.
        source: where the formula is from.
    """

    guarantee: ClassVar[Guarantee]
    source: ClassVar[str] = ""

    @abstractmethod
    def why_not(self, geometry: ConvGeometry) -> str | None:
        """The reason why this method does not apply to a geometry, or None where it does."""

    @abstractmethod
    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        """The norm of an operator that the method supports; call `opnorm.operator_norm`, which checks first."""

    def supports(self, geometry: ConvGeometry) -> bool:
        """Whether the method applies to a geometry."""
        return self.why_not(geometry) is None


def working_weight(
    weight: Tensor, dtype: torch.dtype | None = None, dim: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """`weight` in at least float32 divided by a power of two near its largest entry, and that power; nothing rounds.

    Every norm squares, so that without it weights of 1e-20 would vanish in float32 and weights of 1e20 overflow. With
    `dim` there is one power for all entries along these dimensions.
    """
    wide = weight.to(dtype or torch.promote_types(weight.dtype, torch.float32))
    size = wide.detach().abs()
    largest = size.amax(dim, keepdim=True) if dim else size.amax() if size.numel() else wide.new_zeros(())
    whole, exponent = _EXPONENT[wide.dtype]
    power = (largest.view(whole) & exponent).view(wide.dtype)  # the largest number without its mantissa
    scale = power.clamp(min=torch.finfo(wide.dtype).tiny)  # of zero and of subnormal numbers it leaves nothing
    return wide / scale, scale


def roundoff(x: Tensor) -> float:
    """The relative error of one multiply-add in a matrix product of x, with tensor-core and bfloat16 settings."""
    eps = torch.finfo(x.dtype).eps / 2
    if x.dtype == torch.float32:
        precision = torch.get_float32_matmul_precision()
        eps = max(eps, {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}[precision])
    return eps


def rounded_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype`, never below: what is lost by a conversion is added back by one step upward."""
    if value.dtype == dtype:
        return value
    cast = value.to(dtype)
    step = torch.nextafter(cast.detach(), torch.full_like(cast, math.inf))
    return torch.where(cast.detach().to(value.dtype) < value.detach(), step + (cast - cast.detach()), cast)
