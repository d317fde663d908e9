"""|θ̂(ω)| of the kernels that matter most in a certificate: where in frequency a layer amplifies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opnorm.operator import ConvOperator
from opnorm.rules.factors import Convolution, Depthwise
from opnorm.rules.steps import Share

_POINTS = 24  # of the picture, an axis


@dataclass(frozen=True)
class Response:
    """The response of one layer over frequencies from -π to π, by row; the middle one of the third axis of a volume.

    Attributes:
        name: the layer.
        channel: the channel that is shown; None for a dense convolution, whose largest singular value is shown.
        norm: the layer's constant.
        rows: the response, one list a frequency of the first axis.
    """

    name: str
    channel: int | None
    norm: float
    rows: tuple[tuple[float, ...], ...]


def worst_responses(shares: Sequence[Share], most: int = 8) -> tuple[Response, ...]:
    """The responses of the convolutions with the largest constants."""
    spatial = [
        s
        for s in shares
        if isinstance(s.factor, (Convolution, Depthwise)) and math.prod(s.factor.operator.geometry.kernel_size) > 1
    ]
    spatial.sort(key=lambda s: -s.alone)
    return tuple(_response(s) for s in spatial[:most])


def _response(share: Share) -> Response:
    factor = share.factor
    operator: ConvOperator = factor.operator  # type: ignore[union-attr]
    channel = None
    if isinstance(factor, Depthwise):
        channel = int(factor.scales(2.0).reshape(-1).argmax())
        picture = _transform(operator.weight[channel, 0].double(), operator.geometry.dilation).abs()
    else:
        picture = _largest_singular(operator)
    rows = picture if picture.dim() == 2 else picture[None]
    values = tuple(tuple(round(float(v), 5) for v in row) for row in rows)
    return Response(share.where.path or share.where.op, channel, share.alone, values)


def _transform(kernel: Tensor, dilation: tuple[int, ...]) -> Tensor:
    """θ̂ at _POINTS frequencies an axis, leading dimensions kept in front; only ω = 0 of a third axis."""
    dim = len(dilation)
    shown = min(dim, 2)
    omega = torch.linspace(-math.pi, math.pi, _POINTS, dtype=torch.float64)
    result = kernel.to(torch.complex128)
    if dim == 3:
        result = result.sum(-1)
    for axis in range(shown):
        taps = torch.arange(result.shape[result.dim() - shown + axis], dtype=torch.float64)
        wave = torch.polar(torch.ones(1, dtype=torch.float64), -omega[:, None] * taps * dilation[axis])
        result = torch.movedim(
            torch.tensordot(result, wave, dims=([result.dim() - shown + axis], [1])), -1, result.dim() - shown + axis
        )
    return result


def _largest_singular(operator: ConvOperator) -> Tensor:
    """‖θ̂(ω)‖ by a few power iterations, group by group; a picture, not a bound."""
    g = operator.geometry
    weight = operator.weight.double().reshape(g.groups, -1, *operator.weight.shape[1:])
    pictures = []
    for one in itertools.islice(weight, 16):
        response = _transform(one, g.dilation)  # (rows, columns, *points)
        flat = response.flatten(2).permute(2, 0, 1)  # (points, rows, columns)
        v = torch.ones(flat.shape[0], flat.shape[2], 1, dtype=flat.dtype)
        for _ in range(6):
            v = flat.mH @ (flat @ v)
            v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-300)
        pictures.append((flat @ v).norm(dim=(1, 2)).reshape(response.shape[2:]))
    return torch.stack(pictures).amax(0)
