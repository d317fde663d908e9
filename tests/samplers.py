"""Weights: `SAMPLERS[name](geometry, generator)` are float64 tensors on the CPU; `KNOWN` are operators of known norm.

Kernels whose response peaks at zero frequency, at the highest, at many or nowhere find different faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator

Sampler = Callable[[ConvGeometry, Generator], Tensor]


def gaussian(geometry: ConvGeometry, generator: Generator) -> Tensor:
    return torch.randn(geometry.weight_shape, generator=generator, dtype=torch.float64)


def sparse(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """One entry in three, at times none at all: a zero kernel among them is intended."""
    weight = gaussian(geometry, generator)
    return weight * (torch.rand(weight.shape, generator=generator) < 1 / 3)


def averaging(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """All positive: the response peaks at zero frequency, where the padding matters most."""
    return torch.rand(geometry.weight_shape, generator=generator, dtype=torch.float64) + 0.1


def alternating(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """Signs alternate: the response peaks at the highest frequency, which odd grids miss."""
    weight = averaging(geometry, generator)
    for dim in range(2, weight.dim()):
        sign = (-1.0) ** torch.arange(weight.shape[dim], dtype=torch.float64)
        weight = weight * sign.view(-1, *[1] * (weight.dim() - dim - 1))
    return weight


def delta(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """One tap per pair of channels: a flat response, so that every frequency is a maximiser."""
    weight = torch.zeros(geometry.weight_shape, dtype=torch.float64)
    tap = tuple(int(torch.randint(k, (), generator=generator)) for k in geometry.kernel_size)
    weight[(..., *tap)] = torch.randn(weight.shape[:2], generator=generator, dtype=torch.float64)
    return weight


def constant(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """All entries equal: every channel ties for the maximum."""
    return torch.full(geometry.weight_shape, 0.5, dtype=torch.float64)


def dominant(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """One output channel a thousand times larger than the others."""
    weight = gaussian(geometry, generator)
    weight[int(torch.randint(weight.shape[0], (), generator=generator))] *= 1000
    return weight


def symmetric(geometry: ConvGeometry, generator: Generator) -> Tensor:
    """θ[-n] = θ[n]: a real response."""
    weight = gaussian(geometry, generator)
    axes = tuple(range(2, weight.dim()))
    return weight + weight.flip(axes) if axes else weight


def tiny(geometry: ConvGeometry, generator: Generator) -> Tensor:
    return 1e-10 * gaussian(geometry, generator)


def huge(geometry: ConvGeometry, generator: Generator) -> Tensor:
    return 1e10 * gaussian(geometry, generator)


SAMPLERS: dict[str, Sampler] = {
    f.__name__: f for f in (gaussian, sparse, averaging, alternating, delta, constant, dominant, symmetric, tiny, huge)
}


def identity_kernel(size: tuple[int, ...] = (5, 7)) -> tuple[ConvOperator, float]:
    """A delta at the centre copies its input: norm 1."""
    weight = torch.zeros(3, 1, *[3] * len(size), dtype=torch.float64)
    weight[(slice(None), 0, *[1] * len(size))] = 1
    return ConvOperator(ConvGeometry(3, 3, (3,) * len(size), size, padding=1, groups=3), weight), 1.0


def patches(generator: Generator, kernel: tuple[int, ...] = (2, 3)) -> tuple[ConvOperator, float]:
    """Stride at least the extent: the outputs read disjoint inputs, and the norm is the largest ‖θ_c‖_F."""
    geometry = ConvGeometry(3, 3, kernel, tuple(3 * k for k in kernel), stride=kernel, groups=3)
    weight = gaussian(geometry, generator)
    return ConvOperator(geometry, weight), float(weight.flatten(1).norm(dim=1).max())


def circular_orthogonal(
    generator: Generator, channels: int = 5, size: tuple[int, ...] = (5, 7)
) -> tuple[ConvOperator, float]:
    """An orthogonal matrix at one tap, wrapped around: an orthogonal operator, norm 1."""
    geometry = ConvGeometry(channels, channels, (3,) * len(size), size, padding=1, padding_mode="circular")
    weight = torch.zeros(geometry.weight_shape, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64))
    weight[(..., *[2] * len(size))] = q
    return ConvOperator(geometry, weight), 1.0


def three_taps(middle: float, side: float, size: int) -> tuple[ConvOperator, float]:
    """Symmetric 3 taps, zero padded, tridiagonal Toeplitz: |θ₀| + 2|θ₁| cos(π/(N+1)), whatever the signs.

    The eigenvalues are θ₀ + 2θ₁ cos(πj/(N+1)), j = 1..N, and the cosines come in pairs ±.
    """
    weight = torch.tensor([[[side, middle, side]]], dtype=torch.float64)
    norm = abs(middle) + 2 * abs(side) * math.cos(math.pi / (size + 1))
    return ConvOperator(ConvGeometry(1, 1, 3, size, padding=1), weight), norm


def known(generator: Generator) -> dict[str, tuple[ConvOperator, float]]:
    """Operators whose norm is known without any computation."""
    return {
        "identity 1D": identity_kernel((7,)),
        "identity 2D": identity_kernel((5, 7)),
        "identity 3D": identity_kernel((2, 3, 5)),
        "patches 1D": patches(generator, (3,)),
        "patches 2D": patches(generator, (2, 3)),
        "circular orthogonal": circular_orthogonal(generator),
        "averaging taps": three_taps(0.5, 0.25, 11),
        "difference taps": three_taps(0.5, -0.25, 7),
        "side taps": three_taps(0.25, 0.5, 5),
    }
