"""What the published bounds share: the response F(ω) = Σ_n W[n] e^{-i⟨n,ω⟩} of a kernel, and what it bounds.

Most of the papers bound, or sample, sup_ω ‖F(ω)‖₂: the norm of the convolution on the infinite plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opnorm.bound import roundoff
from opnorm.geometry import ConvGeometry


def outside_plane(geometry: ConvGeometry) -> str | None:
    """Why sup_ω ‖F(ω)‖ does not bound the norm of an operator, or None where it does.

    Zero padding and stride keep a submatrix of the operator on the plane. Circular padding samples F on the grid N and
    then drops rows, as long as no output is computed twice: a + b ≤ e-1.
    """
    for axis in geometry.axes:
        if axis.mode in ("reflect", "replicate"):
            return f"expected zero or circular padding, got {axis.mode}, which repeats inputs; use FourierBound"
        if axis.mode == "circular" and axis.before + axis.after >= axis.extent:
            return (
                f"expected circular padding of at most {axis.extent - 1} in all for an extent of {axis.extent}, got "
                f"({axis.before}, {axis.after}), which repeats outputs; use FourierBound"
            )
    return None


def without_size(geometry: ConvGeometry) -> str | None:
    """Why a grid that depends on N cannot be laid, or None where the input size is known."""
    if geometry.has_size:
        return None
    return f"expected an input size, on which the grid depends, got {geometry}; choose one with geometry.at(input_size)"


def is_circulant(geometry: ConvGeometry) -> bool:
    """Whether every axis wraps around, or has a single tap: then the grid N gives a bound, and no approximation."""
    return all(axis.mode == "circular" or axis.extent == 1 for axis in geometry.axes)


def is_whole_circulant(geometry: ConvGeometry) -> bool:
    """Whether, besides, no row is left out: then the grid N is the norm itself."""
    return is_circulant(geometry) and all(
        axis.stride == 1 and (axis.mode == "zeros" or axis.before + axis.after == axis.extent - 1)
        for axis in geometry.axes
    )


def response(kernels: Tensor, sizes: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """F at the frequencies 2πj/M of the grid `sizes`, (..., frequencies); half of them, since F(-ω) is the conjugate.

    Taps that lie further than M are wrapped around, as in a circular convolution on fewer inputs than the kernel spans.
    """
    dims = tuple(range(-len(sizes), 0))
    if not dims:
        return kernels[..., None]
    for dim, size, step in zip(dims, sizes, dilation, strict=True):
        taps = torch.arange(kernels.shape[dim], device=kernels.device) * step % size
        shape = list(kernels.shape)
        shape[dim] = size
        kernels = kernels.new_zeros(shape).index_add(dim, taps, kernels)
    return torch.fft.rfftn(kernels, dim=dims).flatten(-len(dims))


def response_roundings(kernels: Tensor, sizes: Sequence[int]) -> float:
    """How many roundings, relative to max ‖F‖, the transform costs; kernels are (groups, rows, columns, *kernel).

    Every entry is off by γ Σ_n |W[n]|, γ = 4 log₂ M roundings, and Σ_n ‖W[n]‖_F ≤ √taps ‖W‖_F ≤ √(taps · rank) max ‖F‖.
    """
    if not sizes:
        return 0
    taps, rank = math.prod(kernels.shape[3:]), min(kernels.shape[1:3])
    return 4 * math.log2(2 * math.prod(sizes)) * math.sqrt(taps * rank)


def grid_factor(extent: int, points: int) -> float:
    """(1 - (e-1)/M)^{-1/2}: how far F, of e taps, can rise above its norms at M ≥ e equispaced frequencies.

    Pfister, Bresler (2018), an axis at a time. F(ω) = Σ_j F(ω_j) D(ω-ω_j)/M holds for D the product of two Dirichlet
    kernels, of M and of M-e+1 terms, over M-e+1; Cauchy–Schwarz bounds Σ_j |D|/M. F may as well be a matrix.
    """
    return 1 / math.sqrt(1 - (extent - 1) / points)


def spectral_norms(matrices: Tensor) -> Tensor:
    """‖A‖₂ of a batch of matrices, by singular values; a single row or column needs none."""
    if min(matrices.shape[-2:]) == 1:
        return torch.linalg.vector_norm(matrices, dim=(-2, -1))
    return torch.linalg.svdvals(matrices)[..., 0]


def singular_roundings(matrices: Tensor) -> float:
    """How many roundings `spectral_norms` costs, relative to ‖A‖: a few for each reflection that makes A bidiagonal."""
    return 2 * max(matrices.shape[-2:]) + 8


def gram_norms(matrices: Tensor, steps: int) -> Tensor:
    """‖A‖ ≤ ‖A_t‖_F^{1/2^t} with A_0 = A, A_{t+1} = A_tᴴA_t, each A_t scaled to ‖A_t‖_F = 1 before it is squared."""
    matrices = matrices if matrices.shape[-2] >= matrices.shape[-1] else matrices.mH
    log_scale = matrices.real.new_zeros(matrices.shape[:-2])
    for _ in range(steps):
        size = one_for_zero(torch.linalg.vector_norm(matrices, dim=(-2, -1)).detach())
        matrices, log_scale = matrices / size[..., None, None], 2 * (log_scale + size.log())
        matrices = matrices.mH @ matrices
    return power_of_two_root(torch.linalg.vector_norm(matrices, dim=(-2, -1)), log_scale, steps)


def gram_kernel(kernels: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The kernel of (KᵀK)^{2^(steps-1)} on the plane, (groups, columns, columns, *lags), divided by c, and log c.

    A kernel convolved with itself, `steps` times over: by Fourier transform on a grid on which nothing wraps around.
    """
    dim = kernels.dim() - 3
    sizes = [2**steps * (k - 1) + 1 for k in kernels.shape[3:]]
    half = [*sizes[:-1], sizes[-1] // 2 + 1] if dim else []
    spectrum = response(kernels, sizes, [1] * dim).movedim(-1, 1)  # (groups, frequencies, rows, columns)
    log_scale = kernels.new_zeros(len(kernels))
    for _ in range(steps):
        size = torch.linalg.vector_norm(spectrum.detach(), dim=(-2, -1)).amax(1)
        size = one_for_zero(size)
        spectrum, log_scale = spectrum / size[:, None, None, None], 2 * (log_scale + size.log())
        spectrum = spectrum.mH @ spectrum
    spectrum = spectrum.movedim(1, -1)
    if not dim:
        return spectrum, log_scale
    return torch.fft.irfftn(spectrum.unflatten(-1, half), s=sizes, dim=tuple(range(-dim, 0))), log_scale


def power_of_two_root(value: Tensor, log_scale: Tensor, steps: int) -> Tensor:
    """(value · e^{log_scale})^{1/2^steps}, 0 with a finite gradient at 0."""
    return positive_root(value, 2**steps) * (log_scale / 2**steps).exp()


def positive_root(value: Tensor, degree: int = 2) -> Tensor:
    """value^{1/degree}, 0 with a finite gradient at 0, where the root has none."""
    positive = value > 0
    return torch.where(positive, torch.where(positive, value, 1.0) ** (1 / degree), 0.0)


def one_for_zero(value: Tensor) -> Tensor:
    """A divisor that leaves zeros as they are."""
    return torch.where(value > 0, value, 1.0)


def rounded_upward(value: Tensor, roundings: float, products: float = 0) -> Tensor:
    """`value` times 1 + so many roundings, so that a bound in exact arithmetic is still one in floating point.

    `products` counts those inside matrix products, which may be coarser (TF32).
    """
    return value * (1 + roundings * torch.finfo(value.dtype).eps / 2 + products * roundoff(value))
