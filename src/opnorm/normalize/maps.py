"""Linear maps that a power iteration can run on: x ↦ Ax and y ↦ Aᵀy, of a matrix and of a convolution.

`ConvOperator` is the slow, obvious truth. Here nothing is built per call but the result, there is no index tensor to
send to a GPU, and a convolution on a large input is replaced by one on a small torus whose norm bounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opnorm.geometry import Axis, ConvGeometry
from opnorm.norms.embedding import AxisGrid, axis_grid

_CONV = (None, F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (None, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A·diag(d), with d = 1 where `columns` is None."""

    matrix: Tensor
    columns: Tensor | None = None

    def matvec(self, x: Tensor) -> Tensor:
        """A (d·x)."""
        return torch.mv(self.matrix, x if self.columns is None else x * self.columns)

    def rmatvec(self, y: Tensor) -> Tensor:
        """d·(Aᵀ y)."""
        image = torch.mv(self.matrix.mT, y)
        return image if self.columns is None else image * self.columns

    def dense(self) -> Tensor:
        """The matrix itself."""
        return self.matrix if self.columns is None else self.matrix * self.columns


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution on zero-padded inputs, or, with `torus`, on periodic ones; of a transposed one, its adjoint."""

    weight: Tensor
    layout: Layout

    def matvec(self, x: Tensor) -> Tensor:
        """Correlate, for x of shape `layout.shape`."""
        form = self.layout
        mode = "circular" if form.torus else "constant"
        padded = F.pad(x[None], form.pads, mode)
        convolve: Any = _CONV[form.dim]
        return convolve(padded, self.weight, None, form.stride, 0, form.dilation, form.groups)[0]

    def rmatvec(self, y: Tensor) -> Tensor:
        """The adjoint."""
        form = self.layout
        spread: Any = _CONV_TRANSPOSE[form.dim]
        full = spread(y[None], self.weight, None, form.stride, 0, 0, form.groups, form.dilation)
        if form.torus:
            for dim, size in enumerate(form.shape[1:], 2):
                full = _fold(full, dim, size)
            return full[0]
        return F.pad(full, form.crops(full.shape[2:]))[0]


@dataclass(frozen=True)
class Layout:
    """Where a `Convolution` acts: its input shape, and ‖layer‖ ≤ `factor`·‖Convolution‖."""

    shape: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]  # as F.pad takes them: of the last dimension first
    torus: bool
    factor: float

    @property
    def dim(self) -> int:
        """The number of spatial dimensions."""
        return len(self.stride)

    def crops(self, spans: tuple[int, ...]) -> list[int]:
        """What F.pad has to add to the result of a transposed convolution, or cut off it, to undo the padding."""
        crops = []
        for size, span, before in zip(self.shape[:0:-1], spans[::-1], self.pads[::2], strict=True):
            crops += [-before, before + size - span]
        return crops

    @classmethod
    def of(cls, geometries: tuple[ConvGeometry, ...], tolerance: float) -> Layout:
        """The smaller of the layer's own input and of a torus that bounds all inputs, at most `tolerance` looser."""
        torus = _torus(geometries[0], tolerance)
        if len(geometries) > 1 or not geometries[0].has_size or any(a.mode != "zeros" for a in geometries[0].axes):
            return torus
        own = _own(geometries[0])
        return own if math.prod(own.shape) <= math.prod(torus.shape) else torus


def _own(geometry: ConvGeometry) -> Layout:
    axes = geometry.axes
    shape = (_inputs(geometry), *(a.inputs or 0 for a in axes))
    pads = tuple(n for a in reversed(axes) for n in (a.before, a.after))
    stride, dilation = tuple(a.stride for a in axes), tuple(a.dilation for a in axes)
    return Layout(shape, geometry.groups, stride, dilation, pads, False, 1.0)


def _torus(geometry: ConvGeometry, tolerance: float) -> Layout:
    """The circulant whose frequencies are the grid of `FourierBound` for every input size."""
    share = (1 + tolerance) ** (1 / geometry.dim) - 1
    grids = [_any_size(axis, share) for axis in geometry.axes]
    shape = (_inputs(geometry), *(max(g.points * g.step, g.kernel) for g in grids))
    pads = tuple(n for g in reversed(grids) for n in (0, g.kernel - 1))
    factor = math.prod(g.factor for g in grids)
    return Layout(shape, geometry.groups, tuple(g.step for g in grids), (1,) * len(grids), pads, True, factor)


def _any_size(axis: Axis, tolerance: float) -> AxisGrid:
    return axis_grid(axis._replace(inputs=None, outputs=None), tolerance)


def _inputs(geometry: ConvGeometry) -> int:
    """Input channels of the convolution, which of a transposed layer is the adjoint."""
    return geometry.weight_shape[1] * geometry.groups


def _fold(x: Tensor, dim: int, size: int) -> Tensor:
    """The sum of the parts of x that lie on the same positions of a torus."""
    head, rest = x.narrow(dim, 0, min(size, x.shape[dim])), x.shape[dim] - size
    if rest <= 0:
        pads = [0, 0] * (x.dim() - dim - 1) + [0, -rest]
        return F.pad(head, pads)
    tail = F.pad(x.narrow(dim, size, rest), [0, 0] * (x.dim() - dim - 1) + [0, size - rest])
    return head + tail
