"""The parametrization behind `module.weight`: a base weight, kept at norm 1, times K or K·tanh(s)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from opnorm.normalize.measure import Measure

SCALINGS = ("hard", "soft", "cap")
UPDATES = ("project", "differentiable")


class NormScale(nn.Module):
    """`"hard"`: weight = K·W/‖W‖, `"soft"`: K·tanh(s)·W/‖W‖, `"cap"`: W/max(1, ‖W‖/K), with W the base weight.

    With `update="project"` the base weight itself is divided by its norm after each optimizer step, and all that is
    left here is a factor. With `"differentiable"` the division is part of the graph.

    What a step leaves for the next is in buffers, and so in the state dict: `vector`, where the power iteration goes
    on, `last`, the norm of the base weight before the last normalisation and the residual it was known to, and `steps`.
    None of them enters the weight in evaluation, so that a copy of the model whose buffers were averaged, or forgotten,
    is as correct as the model.
    """

    def __init__(self, weight: Tensor, K: float, scaling: str, update: str, s_init: float, measure: Measure):
        super().__init__()
        self.K, self.scaling, self.update, self.measure = K, scaling, update, measure
        self.registered = False
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = weight.device
        # One element and not a scalar: FSDP shards no scalars.
        self.s = nn.Parameter(torch.full((1,), s_init, dtype=dtype, device=device)) if scaling == "soft" else None
        self.register_buffer("last", torch.zeros(2, dtype=dtype, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("vector", measure.start(weight, dtype))
        self.last: Tensor
        self.steps: Tensor
        self.vector: Tensor | None

    def forward(self, original: Tensor) -> Tensor:
        if self.update == "differentiable" and type(torch.empty(0)) is not Tensor and not torch.compiler.is_compiling():
            return original  # a pass on fake tensors, for shapes: there are no values to take a norm of
        return self.effective(original, self.factor(original))

    def effective(self, original: Tensor, factor: Tensor | float) -> Tensor:
        """The weight of the layer, from the base weight and K or K·tanh(s)."""
        if self.update == "project":
            return original if self.scaling == "cap" or (self.s is None and factor == 1) else original * factor
        with torch.autocast(original.device.type, enabled=False):
            sigma = self.measure.differentiable(original, self.vector, fresh=not self.training)
        if self.scaling == "cap":
            return original * torch.where(sigma > self.K, self.K / sigma, 1.0).to(original.dtype)
        return original * (factor / torch.where(sigma > 0, sigma, 1.0)).to(original.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The base weight after `module.weight = weight`; its norm is corrected by the next step."""
        if not self.registered:
            raise NotImplementedError  # which tells torch to keep the weight as it is
        if self.scaling == "cap":
            return weight
        return weight / (self.value() or 1.0)

    def factor(self, like: Tensor) -> Tensor | float:
        """K or K·tanh(s), which the normalised weight is multiplied by."""
        return self.K if self.s is None else (self.K * torch.tanh(self.s)).to(like.dtype)

    def value(self) -> float:
        """The same as a number; 1 for `"cap"`, which multiplies by nothing."""
        if self.s is None:
            return 1.0 if self.scaling == "cap" else self.K
        s = self.s.detach()
        return self.K * math.tanh(float(s.full_tensor() if hasattr(s, "full_tensor") else s))

    def extra_repr(self) -> str:
        return f"K={self.K:g}, scaling={self.scaling!r}, update={self.update!r}"
