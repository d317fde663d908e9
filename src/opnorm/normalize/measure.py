"""How the norm of one weight is measured: by channels, by a warm-started power iteration, or by any `Method`.

Each way exists twice: here for one layer at a time, plainly; in `engine` for all layers at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from opnorm.bound import Guarantee, Method, rounded_up
from opnorm.geometry import ConvGeometry
from opnorm.normalize.maps import Convolution, Layout, Matrix
from opnorm.normalize.screening import Form
from opnorm.normalize.spectra import largest_response
from opnorm.norms.fourier import FourierBound
from opnorm.norms.functional import operator_norm
from opnorm.norms.gram import smaller_gram
from opnorm.norms.groups import group_weights, has_scalar_response
from opnorm.norms.power import PowerIteration
from opnorm.operator import ConvOperator

NARROW = 32  # rows of all matrices at one frequency, for `Spectra`
WIDE = 2e-3  # the residual of wide dense convolutions, whose singular values lie close together
TORUS = 1e-2  # how much looser a dense layer may get by iterating on a small torus


@dataclass(frozen=True, eq=False)
class Measured:
    """The norm σ of a base weight, with what the next step starts from.

    Attributes:
        sigma: the value to divide by, 0-dim.
        channels: the norm of each channel, of depthwise layers.
        vector: where the power iteration stopped.
        residual: ‖AᵀAv − ‖Av‖²v‖/‖Av‖² of the last iteration.
    """

    sigma: Tensor
    channels: Tensor | None = None
    vector: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class Measure(ABC):
    """The method of one weight, and the geometries of the layers that use it; the norm is the largest of theirs."""

    geometries: tuple[ConvGeometry, ...]
    method: Method
    guarantee: Guarantee | None

    def start(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The state before the first measurement."""
        return None

    @abstractmethod
    def one(self, weight: Tensor, vector: Tensor | None, columns: Tensor | None, eps: float | None) -> Measured:
        """The norm of `weight`, without autograd; `columns` scales the inputs of a pointwise layer."""

    @abstractmethod
    def differentiable(self, weight: Tensor, vector: Tensor | None, fresh: bool) -> Tensor:
        """σ with its gradient, the same whenever it is computed again; `fresh`: from the weight alone."""

    def _fresh(self, weight: Tensor) -> Tensor:
        operators = (ConvOperator(geometry, weight) for geometry in self.geometries)
        return torch.stack([operator_norm(o, guarantee="upper").value for o in operators]).amax()


@dataclass(frozen=True)
class Channels(Measure):
    """Layers whose channels are independent: `FourierBound` for each channel, then the largest."""

    method: FourierBound

    @cached_property
    def forms(self) -> list[Form]:
        """What `screening` needs to know of each geometry."""
        return [Form.of(g, self.method.grids(g)) for g in self.geometries]

    @property
    def wants_largest_only(self) -> bool:
        """Whether no more than the largest channel's bound is asked for."""
        return self.method.finalists is not None and not self.method.refine

    def one(self, weight: Tensor, vector: Tensor | None, columns: Tensor | None, eps: float | None) -> Measured:
        each = [self.method.compute(ConvOperator(g, weight)).per_channel for g in self.geometries]
        channels = torch.stack([c for c in each if c is not None]).amax(0)
        return Measured(channels.amax(), channels)

    def differentiable(self, weight: Tensor, vector: Tensor | None, fresh: bool) -> Tensor:
        if fresh:
            return self._fresh(weight)
        values = [self.method.compute(ConvOperator(g, weight)).value for g in self.geometries]
        return torch.stack(values).amax()


@dataclass(frozen=True)
class Iterated(Measure):
    """Matrices and dense convolutions: σ² = ‖Av‖²(1 + ρ), with v from a warm-started power iteration, ρ its residual.

    ‖Av‖ alone is a lower bound. AᵀA has an eigenvalue within ρ‖Av‖² of ‖Av‖², the largest one as soon as v has turned
    to it, and then σ ≥ ‖A‖. With `guarantee="upper"` a matrix has its value proved, in float64, and for convolutions
    `FourierBound` takes the place of this measure.
    """

    method: PowerIteration

    def map(self, weight: Tensor, columns: Tensor | None = None) -> Matrix | Convolution:
        """The linear map of the layer, or of its adjoint."""
        if self.is_matrix:
            return Matrix(weight.flatten(1), columns)
        return Convolution(weight, self.layout)

    @cached_property
    def is_matrix(self) -> bool:
        """Whether the layer is its connectivity matrix."""
        return self.geometries[0].is_matrix

    @cached_property
    def layout(self) -> Layout:
        """Where a convolution is iterated."""
        return Layout.of(self.geometries, TORUS)

    @cached_property
    def factor(self) -> float:
        """How much the norm of the layer may exceed that of the map."""
        return 1.0 if self.is_matrix else self.layout.factor

    def start(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (math.prod(weight.shape[1:]),) if self.is_matrix else self.layout.shape
        generator = torch.Generator().manual_seed(0)  # the same start on every device
        vector = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (vector / torch.linalg.vector_norm(vector)).to(weight.device, dtype)

    def one(self, weight: Tensor, vector: Tensor | None, columns: Tensor | None, eps: float | None) -> Measured:
        linear, v = self.map(weight, columns), vector
        assert v is not None
        v = v / torch.linalg.vector_norm(v)
        for _ in range(self.method.max_iter):
            length, size, residual, v = advance(linear, v)
            if not residual > (self.method.eps if eps is None else eps):
                break
        return Measured(self.factor * self.value(linear, length, residual, size), None, v, residual)

    def value(self, linear: Matrix | Convolution, length: Tensor, residual: Tensor, size: Tensor) -> Tensor:
        """σ, from ‖Av‖, ρ and ‖AᵀAv‖/‖Av‖."""
        if self.method.prove and isinstance(linear, Matrix):
            return proved(linear.dense(), size, self.method.eps)
        return length * (1 + residual).sqrt()

    def differentiable(self, weight: Tensor, vector: Tensor | None, fresh: bool) -> Tensor:
        if fresh:
            return self._fresh(weight)
        assert vector is not None
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        with torch.no_grad():
            linear = self.map(wide.detach())
            length, size, residual, v = advance(linear, vector / torch.linalg.vector_norm(vector))
            sigma = self.factor * self.value(linear, length, residual, size)
            image = linear.matvec(v)
            norm = torch.linalg.vector_norm(image)
            u = image / torch.where(norm > 0, norm, 1.0)
        moved = (u * self.map(wide).matvec(v)).sum()
        return sigma * (1 + (moved - moved.detach()) / torch.where(norm > 0, norm, 1.0))


@dataclass(frozen=True)
class Spectra(Measure):
    """Narrow dense convolutions, such as a stem: ‖H^{2^p}‖_F^{1/2^{p+1}} for H = θ̂θ̂ᴴ at each frequency of
    `FourierBound`.

    The same bound as `FourierBound`, with a fixed number of squarings: on a GPU nothing is decided on the host. There
    is no vector that could stay at a frequency after the peak has moved to another one.
    """

    method: FourierBound

    def one(self, weight: Tensor, vector: Tensor | None, columns: Tensor | None, eps: float | None) -> Measured:
        look = host_may_look(weight)
        grouped = ((group_weights(weight.double(), g), self.method.grids(g)) for g in self.geometries)
        values = [largest_response(weights, grids, look) for weights, grids in grouped]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return Measured(rounded_up(torch.stack(values).amax(), dtype))

    def differentiable(self, weight: Tensor, vector: Tensor | None, fresh: bool) -> Tensor:
        if fresh:
            return self._fresh(weight)
        values = [self.method.compute(ConvOperator(g, weight)).value for g in self.geometries]
        return torch.stack(values).amax()


@dataclass(frozen=True)
class Other(Measure):
    """Any other method, layer by layer."""

    def start(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        state = self._compute(weight, None).state
        if state is not None and not isinstance(state, Tensor):
            raise ValueError(
                f"expected a method whose state is one tensor, which the state dict can hold, got {self.method}"
            )
        if state is not None and len(self.geometries) > 1:
            raise ValueError(
                f"expected a method without a state for a weight that is used in {len(self.geometries)} ways, got "
                f"{self.method}; leave method out"
            )
        return state

    def one(self, weight: Tensor, vector: Tensor | None, columns: Tensor | None, eps: float | None) -> Measured:
        with torch.no_grad():
            bound = self._compute(weight, vector)
        return Measured(bound.value, bound.per_channel, bound.state)

    def differentiable(self, weight: Tensor, vector: Tensor | None, fresh: bool) -> Tensor:
        return self._fresh(weight) if fresh else self._compute(weight, vector).value

    def _compute(self, weight: Tensor, vector: Tensor | None):  # type: ignore[no-untyped-def]
        bounds = [self.method.compute(ConvOperator(g, weight), vector) for g in self.geometries]
        if len(bounds) == 1:
            return bounds[0]
        return replace(bounds[0], value=torch.stack([b.value for b in bounds]).amax(), per_channel=None)


def advance(linear: Matrix | Convolution, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One power iteration from a unit vector: ‖Av‖, ‖Aᵀu‖ with u = Av/‖Av‖, ρ, and Aᵀu/‖Aᵀu‖.

    Divided by ‖Av‖ in between, since AᵀAv would underflow for small A. Where A is zero, v stays.
    """
    image = linear.matvec(v)
    length = torch.linalg.vector_norm(image, dtype=torch.float64).to(v.dtype)
    safe = torch.where(length > 0, length, 1.0)
    back = linear.rmatvec(image / safe)
    residual = torch.linalg.vector_norm(back - length * v, dtype=torch.float64).to(v.dtype) / safe
    size = torch.linalg.vector_norm(back, dtype=torch.float64).to(v.dtype)
    return length, size, residual, torch.where(size > 0, back / torch.where(size > 0, size, 1.0), v)


def proved(matrix: Tensor, sigma: Tensor, eps: float) -> Tensor:
    """(1+δ)σ ≥ ‖A‖, δ = eps/2 or 4·eps: proved by a Cholesky factorisation of (1+δ)²σ²I − AᵀA.

    If neither can be proved, √(‖A‖₁‖A‖_∞) or ‖A‖_F. On a GPU no value goes to the host, and both are tried.
    """
    gram = smaller_gram(matrix.double())
    unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # Rounding of the product and of the factorisation, both relative to the trace.
    safety = 8 * torch.finfo(gram.dtype).eps * (len(gram) + max(matrix.shape)) * gram.diagonal().sum()
    absolute = matrix.abs().double()
    norms = (absolute.sum(0).amax() * absolute.sum(1).amax()).sqrt(), gram.diagonal().sum().sqrt()
    value = torch.minimum(*norms) * (1 + 1e-10)
    for delta in (eps / 2, 4 * eps):
        candidate = (1 + delta) * sigma.double()
        # info is positive where the factorisation breaks down, and for a NaN nothing is proved
        proof = torch.linalg.cholesky_ex((candidate.square() - safety) * unit - gram).info == 0
        value = torch.where(proof & (candidate < value), candidate, value)
        if host_may_look(matrix) and bool(proof):
            break
    return rounded_up(value, sigma.dtype)


def host_may_look(tensor: Tensor) -> bool:
    """Whether reading a value costs nothing: on a CPU, outside a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def measure_for(
    geometries: tuple[ConvGeometry, ...], method: Method | None, guarantee: Guarantee | None, every_channel: bool
) -> Measure:
    """The way to measure these layers: the method asked for, or the one that costs least.

    Args:
        every_channel: whether the norm of every channel of a depthwise layer counts, and not the largest alone.
    """
    geometry, alike = geometries[0], _alike(geometries)
    scalar = all(g.groups == geometry.groups and _is_scalar(g) for g in geometries)
    channels = scalar or (every_channel and alike and geometry.kind == "depthwise")
    if method is None:
        method = _default(geometry, alike, scalar, guarantee)
    _check(geometries, method, guarantee)
    if isinstance(method, FourierBound) and channels:
        return Channels(geometries, replace(method, finalists=None) if every_channel else method, guarantee)
    if isinstance(method, FourierBound) and _narrow(geometry):
        return Spectra(geometries, method, guarantee)
    if isinstance(method, PowerIteration) and alike and not (scalar and method.prove):
        return Iterated(geometries, method, guarantee)
    return Other(geometries, method, guarantee)


def _default(geometry: ConvGeometry, alike: bool, scalar: bool, guarantee: Guarantee | None) -> Method:
    if geometry.is_matrix and alike:
        return PowerIteration(eps=0.01, prove=guarantee == "upper")
    if scalar or guarantee == "upper" or not alike or _narrow(geometry):
        return FourierBound(tolerance=5e-3)
    return PowerIteration(eps=WIDE)


def _alike(geometries: tuple[ConvGeometry, ...]) -> bool:
    """Whether one power iteration serves all layers that use a weight: they differ in the size of the input alone."""
    if any(g.is_matrix for g in geometries):
        return all(g.is_matrix for g in geometries)
    return len({g.at(None) for g in geometries}) == 1


def _is_scalar(geometry: ConvGeometry) -> bool:
    rows, columns = geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1]
    return not geometry.is_matrix and has_scalar_response(rows, columns, FourierBound().grids(geometry))


def _narrow(geometry: ConvGeometry) -> bool:
    """Whether the matrix at one frequency has so few rows or columns that squaring it at all of them costs little."""
    rows, columns = geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1]
    return geometry.dim > 0 and geometry.groups * min(rows, columns * math.prod(geometry.stride)) <= NARROW


def _check(geometries: tuple[ConvGeometry, ...], method: Method, guarantee: Guarantee | None) -> None:
    if guarantee == "upper" and method.guarantee not in ("upper", "exact"):
        raise ValueError(
            f"expected a method that gives upper bounds, as guarantee='upper' asks, got {method}; leave out method"
        )
    if isinstance(method, PowerIteration) and not method.prove:
        return  # it runs on layers of any size here: on a torus
    for geometry in geometries:
        reason = method.why_not(geometry)
        if reason:
            raise ValueError(reason)
