"""`Unit`: one weight that is kept at its norm, with the layers that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opnorm.geometry import ConvGeometry
from opnorm.normalize.measure import Channels, Iterated, Measure
from opnorm.normalize.scaling import NormScale
from opnorm.normalize.shards import Rows

SETTLED = 1e-3


@dataclass(eq=False)
class Unit:
    """A weight, the layers that use it, and how it is measured and scaled.

    Attributes:
        names, modules: the layers; more than one where the weight is tied.
        scale: the parametrization that all of them share.
        before: the depthwise unit that this pointwise one is bounded together with.
        per_channel: whether each channel is scaled by its own norm.
        upper: whether the norm of the rounded weight must not exceed K either.
        seen: the version of a frozen weight when it was last normalised.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    scale: NormScale
    before: Unit | None = None
    per_channel: bool = False
    upper: bool = False
    seen: int = field(default=-1, repr=False)

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.names[0]

    @property
    def measure(self) -> Measure:
        """How the norm is found."""
        return self.scale.measure

    @property
    def geometry(self) -> ConvGeometry:
        """The geometry of the first layer."""
        return self.measure.geometries[0]

    @cached_property
    def _parametrizations(self) -> nn.Module:
        found = self.modules[0].parametrizations["weight"]  # type: ignore[index]
        assert isinstance(found, nn.Module)
        return found

    @property
    def weight(self) -> Tensor:
        """The base weight, as the optimizer sees it."""
        return self._parametrizations._parameters["original"]  # type: ignore[return-value]

    @property
    def due(self) -> bool:
        """Whether the weight is trained, or was frozen and has been written to since."""
        weight = self.weight
        return weight.requires_grad or weight._version != self.seen

    @property
    def settled(self) -> bool:
        """Whether the weight is frozen and has been normalised: then a change within rounding is none."""
        return self.seen >= 0 and not self.weight.requires_grad

    @property
    def margin(self) -> float:
        """By how much rounding the weight, twice, can raise its norm, relative to it.

        ‖E‖ ≤ √taps·‖E‖_F ≤ √taps·u·‖W‖_F and ‖W‖_F ≤ √r·‖W‖, r the rank at one frequency. That is the worst case, and
        the margin of guarantee="upper"; errors that are not all of one sign leave next to nothing of it.
        """
        dtype = self.weight.dtype
        u = torch.finfo(dtype).eps / 2
        if not self.upper:
            return 2 * u if dtype.itemsize >= 4 else 0.0
        g = self.geometry
        rank = min(g.weight_shape[0] // g.groups, g.weight_shape[1])
        return 2 * u * (math.prod(g.kernel_size) * math.sqrt(rank) + 4)

    def factors(self, sigma: Tensor) -> Tensor:
        """What to multiply base weights by, σ their norms or those of their channels; a zero weight stays."""
        cap = self.scale.K if self.scale.scaling == "cap" else None
        quotient = (1 - self.margin) * (cap or 1.0) / torch.where(sigma > 0, sigma, 1.0)
        keep = sigma == 0 if cap is None else sigma <= cap
        if self.settled:
            keep = keep | ((quotient - 1).abs() < SETTLED)
        return torch.where(keep, 1.0, quotient)

    def spread(self, factors: Tensor, rows: Rows) -> Tensor:
        """Factors of channels in the shape of the rows of the weight, which a scalar has already."""
        if factors.dim() == 0:
            return factors
        each = rows.part(factors.repeat_interleave(rows.total // self.geometry.groups))
        return each.view(-1, *[1] * (rows.tensor.dim() - 1))

    def bake(self) -> None:
        """Write the effective weight into the parameter, and take the parametrization off every layer."""
        weight, scale = self.weight, self.scale
        if scale.update == "differentiable":
            scale.training = False  # the norm afresh, not from the last singular vector
            effective = scale(weight)
        for module in self.modules:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        if scale.update == "differentiable":
            weight.copy_(effective)
        elif scale.scaling != "cap":
            weight.mul_(scale.factor(weight))


@dataclass(frozen=True, eq=False)
class Kinds:
    """Units of one device and precision, by the way that their norms are found."""

    channels: Sequence[Unit]
    iterated: Sequence[Unit]
    others: Sequence[Unit]

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Kinds:
        """Sorted by measure, in order."""
        channels = [u for u in units if isinstance(u.measure, Channels)]
        iterated = [u for u in units if isinstance(u.measure, Iterated)]
        others = [u for u in units if not isinstance(u.measure, Channels | Iterated)]
        return cls(channels, iterated, others)
