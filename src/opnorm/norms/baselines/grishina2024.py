"""`Grishina2024`: the spectral norm of the kernel as a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Method, NormBound, working_weight
from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.baselines.kernels import one_for_zero, outside_plane
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator

Factors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Grishina2024(Method):
    """√Πk · ‖W‖_σ, ‖W‖_σ = max |W(u, v, x, y)| over complex unit vectors, the norm of the kernel as a tensor.

    uᴴF(ω)v is such a form, with waves of length √k in place of x and y, so that √Πk ‖W‖_σ ≥ sup_ω ‖F(ω)‖ ≥ ‖K‖. The
    vectors must be complex: over the reals it is no bound (two taps, the identity and a quarter turn: √2 against 2).
    With stride s, W is first rearranged to C_out × (C_in Πs) channels of Π⌈k/s⌉ taps, as published; a circle that the
    stride does not divide keeps the unit-stride value.

    But ‖W‖_σ is found by the higher-order power method: each vector in turn becomes the normalised contraction of W
    with the others. It climbs to a local maximum, and so the value may fall below the norm of the operator: there is no
    guarantee, whatever the number of steps. `restarts` takes the best of several starts. The norm of each unfolding of
    W is proved to be at least ‖W‖_σ; the smallest of those is `Singla2021`.

    It is meant for every input size, zero padding and circular padding. Groups: the largest of the groups' values.
    Transposed: of the convolution whose adjoint it is. Published in 2D; the same in any dimension.

    Args:
        steps: how often each vector is updated.
        restarts: how many random starts, 1 as published.
        seed: of the starts.
    """

    steps: int = 100
    restarts: int = 1
    seed: int = 0

    guarantee = "none"
    source = "Grishina, Gorbunov, Rakhuba: Tight and Efficient Upper Bound on Spectral Norm of Convolutional Layers, ECCV 2024"  # fmt: skip  # noqa: E501

    def __post_init__(self) -> None:
        if self.steps < 1 or self.restarts < 1:
            raise ValueError(f"expected at least one step and one start, got {self.steps} and {self.restarts}")

    def why_not(self, geometry: ConvGeometry) -> str | None:
        return outside_plane(geometry)

    def compute(self, operator: ConvOperator, state: Any = None) -> NormBound:
        weight, scale = working_weight(operator.weight)
        tensors = group_weights(weight, operator.geometry)
        for dim, axis in enumerate(operator.geometry.axes, start=3):
            tensors = _space_to_depth(tensors, dim, axis)
        tensors = tensors.to(torch.promote_types(tensors.dtype, torch.complex64))
        with torch.no_grad():
            factors = self._ascend(tensors, self._start(tensors, state))
        values = _form(tensors, factors).abs().amax(0)
        each = scale * math.sqrt(math.prod(tensors.shape[3:])) * values
        return NormBound(each.amax(), "none", self, state=factors, per_channel=each)

    def _start(self, tensors: Tensor, state: Factors | None) -> Factors:
        shapes = [(self.restarts, len(tensors), size) for size in tensors.shape[1:]]
        if state is None:
            generator = torch.Generator().manual_seed(self.seed)
            draw = [torch.randn(shape, generator=generator, dtype=torch.complex128) for shape in shapes]
            return tuple((x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).to(tensors) for x in draw)
        got = [tuple(x.shape) for x in state]
        if got != shapes:
            raise ValueError(f"expected the state of an earlier call, of shapes {shapes}, got {got}; pass state=None")
        return tuple(x.to(tensors) for x in state)

    def _ascend(self, tensors: Tensor, factors: Factors) -> Factors:
        vectors = list(factors)
        for _ in range(self.steps):
            for mode in range(len(vectors)):
                image = _form(tensors, vectors, mode).conj()
                size = torch.linalg.vector_norm(image, dim=-1, keepdim=True)
                vectors[mode] = torch.where(size > 0, image / one_for_zero(size), vectors[mode])
        return tuple(vectors)


def _form(tensors: Tensor, factors: Factors | list[Tensor], free: int | None = None) -> Tensor:
    """W contracted with all vectors, (restarts, groups), or with all but one, (restarts, groups, size)."""
    letters = "abcde"[: len(factors)]
    inputs = [f"rg{letter}" for i, letter in enumerate(letters) if i != free]
    vectors = [x for i, x in enumerate(factors) if i != free]
    result = "rg" + ("" if free is None else letters[free])
    return torch.einsum(f"g{letters},{','.join(inputs)}->{result}", tensors, *vectors)


def _space_to_depth(kernels: Tensor, dim: int, axis: Axis) -> Tensor:
    """A strided axis as one of stride 1: the s positions of a stride become input channels, beside the others."""
    s = axis.stride
    if s == 1 or (axis.mode == "circular" and (axis.inputs is None or axis.inputs % s)):
        return kernels
    spread = -(-axis.extent // s) * s
    shape = list(kernels.shape)
    shape[dim] = spread
    taps = torch.arange(axis.kernel, device=kernels.device) * axis.dilation
    kernels = kernels.new_zeros(shape).index_add(dim, taps, kernels)
    return kernels.unflatten(dim, (-1, s)).movedim(dim + 1, 3).flatten(2, 3)
