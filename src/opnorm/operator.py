"""`ConvOperator`: a geometry with a weight, the linear map x ↦ Kx itself: the slow, obvious truth to test against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opnorm.geometry import ConvGeometry

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@dataclass(frozen=True, eq=False)
class ConvOperator:
    """The linear map of a layer, bias left out: a `ConvGeometry` and a weight of shape `geometry.weight_shape`.

    torch's modules compute Kx; a norm needs Kᵀy too, on the same sizes and with the same padding.

    Examples:
        >>> geometry = ConvGeometry(1, 1, 3, 5, padding=1)
        >>> operator = ConvOperator(geometry, torch.tensor([[[1.0, 2.0, 3.0]]]))
        >>> operator.to_dense().shape
        torch.Size([5, 5])
    """

    geometry: ConvGeometry
    weight: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or not self.weight.is_floating_point():
            got = self.weight.dtype if isinstance(self.weight, Tensor) else type(self.weight).__name__
            raise ValueError(f"expected a real floating point weight tensor, got {got}; convert it with .float()")
        if tuple(self.weight.shape) != self.geometry.weight_shape:
            raise ValueError(
                f"expected a weight of shape {self.geometry.weight_shape} for {self.geometry}, got "
                f"{tuple(self.weight.shape)}; check channels, groups and transposed"
            )
        if self.weight.is_meta:
            raise ValueError("expected a weight with values, got one on the meta device; materialise the model first")

    def matvec(self, x: Tensor) -> Tensor:
        """Kx, for x of shape (in_channels, *input_size) or with batch dimensions before."""
        read, written = self.geometry.shapes
        flat, batch = self._flatten(x, read, "x")
        image = self._scatter(flat) if self.geometry.transposed else self._correlate(flat)
        return image.reshape(*batch, *written)

    def rmatvec(self, y: Tensor) -> Tensor:
        """Kᵀy, for y of shape (out_channels, *output_size) or with batch dimensions before."""
        read, written = self.geometry.shapes
        flat, batch = self._flatten(y, written, "y")
        image = self._correlate(flat) if self.geometry.transposed else self._scatter(flat)
        return image.reshape(*batch, *read)

    def to_dense(self) -> Tensor:
        """The matrix of K: (out_channels · output positions) × (in_channels · input positions)."""
        read, _ = self.geometry.shapes
        columns = math.prod(read)
        basis = torch.eye(columns, dtype=self.weight.dtype, device=self.weight.device)
        return self.matvec(basis.reshape(columns, *read)).reshape(columns, -1).T

    def to(self, dtype: torch.dtype) -> ConvOperator:
        """The same operator with its weight in another precision."""
        return ConvOperator(self.geometry, self.weight.to(dtype))

    def detach(self) -> ConvOperator:
        """The same operator, cut from the autograd graph."""
        return ConvOperator(self.geometry, self.weight.detach())

    def _correlate(self, x: Tensor) -> Tensor:
        """Pad, then convolve: the plain convolution, forward."""
        g = self.geometry
        if g.dim == 0:
            return F.linear(x, self.weight)
        for dim, index in enumerate(self._pad_indices(x.device), 2):
            x = F.pad(x, [0, 0] * (g.dim + 1 - dim) + [0, 1]).index_select(dim, index)
        return _CONV[g.dim](x, self.weight, None, g.stride, 0, g.dilation, g.groups)

    def _scatter(self, y: Tensor) -> Tensor:
        """The adjoint of `_correlate`: a transposed convolution, then every padded position is added to its source."""
        g = self.geometry
        if g.dim == 0:
            return y @ self.weight
        x = _CONV_TRANSPOSE[g.dim](y, self.weight, None, g.stride, 0, 0, g.groups, g.dilation)
        for dim, (axis, index) in enumerate(zip(g.axes, self._pad_indices(y.device), strict=True), 2):
            inputs, _ = axis.size
            room = x.new_zeros(*x.shape[:dim], inputs + 1, *x.shape[dim + 1 :])
            x = room.index_add(dim, index, x).narrow(dim, 0, inputs)
        return x

    def _pad_indices(self, device: torch.device) -> list[Tensor]:
        """Per dimension, the input at each position that the kernel passes over; one past the end means a zero."""
        indices = []
        for axis in self.geometry.axes:
            inputs, outputs = axis.size
            span = axis.stride * (outputs - 1) + axis.extent
            sources = (axis.source(p - axis.before) for p in range(span))
            indices.append(torch.tensor([inputs if q is None else q for q in sources], device=device))
        return indices

    def _flatten(self, x: Tensor, shape: tuple[int, ...], name: str) -> tuple[Tensor, tuple[int, ...]]:
        batch = x.shape[: x.dim() - len(shape)]
        if tuple(x.shape[len(batch) :]) != shape:
            raise ValueError(f"expected {name} of shape {shape}, batch dimensions before, got {tuple(x.shape)}")
        like = self.weight
        if x.dtype != like.dtype or x.device != like.device:
            raise ValueError(
                f"expected {name} as {like.dtype} on {like.device} like the weight, got {x.dtype} on {x.device}"
            )
        return x.reshape(-1, *shape), tuple(batch)
