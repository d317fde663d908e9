"""Everyone who gives a norm of a layer: this library, the published methods, and the packages that people install."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opnorm import ConvGeometry, ConvOperator, Exact, FourierBound, GramIteration, Method, PowerIteration, auto
from opnorm.norms import baselines

PACKAGES = ("deel-torchlip", "orthogonium", "normflows")
REFERENCE = "auto"  # whose time the others are compared with
CALLS = 50  # of what keeps its vector from one training step to the next, before its value counts
ROUNDING = 1e-6  # in float32, of value over norm
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def is_below(ratio: float) -> bool:
    """Whether a value is no bound: less than the norm by more than rounding, or not a number."""
    return not ratio >= 1 - ROUNDING


class Refused(Exception):
    """A layer that a contender does not take, with its reason."""


@dataclass(frozen=True)
class Trial:
    """One contender on one layer.

    Attributes:
        call: what is timed; it returns the norm, or the weight that the layer uses after normalisation.
        calls: how often it runs before its value counts.
    """

    call: Callable[[], Any]
    calls: int = 1


@dataclass(frozen=True)
class Contender:
    """A way to the norm of a layer; `prepare` does once for a layer what is not paid at every call."""

    family: Literal["ours", "published", "package"]
    prepare: Callable[[ConvOperator], Trial]


def versions() -> dict[str, str | None]:
    """The installed version of every package, None where it is not installed."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _method(choose: Callable[[ConvGeometry], Method], operator: ConvOperator, warm: bool = False) -> Trial:
    method, state = choose(operator.geometry), None
    if (reason := method.why_not(operator.geometry)) is not None:
        raise Refused(reason)

    def call() -> Any:
        nonlocal state
        bound = method.compute(operator, state)
        state = bound.state if warm else None
        return bound

    return Trial(call, CALLS if warm else 1)


def _ours(method: Method, warm: bool = False) -> Contender:
    return Contender("ours", partial(_method, lambda geometry: method, warm=warm))


def _published(method: Method, warm: bool = False) -> Contender:
    return Contender("published", partial(_method, lambda geometry: method, warm=warm))


def _plane(operator: ConvOperator, package: str) -> dict[str, Any]:
    """The arguments of a two-dimensional convolution of a package that has no other."""
    geometry = operator.geometry
    if geometry.dim != 2:
        raise Refused(f"{package} has no {geometry.dim}-dimensional convolution for this")
    return _arguments(geometry)


def _arguments(geometry: ConvGeometry) -> dict[str, Any]:
    return {
        "in_channels": geometry.in_channels,
        "out_channels": geometry.out_channels,
        "kernel_size": geometry.kernel_size,
        "stride": geometry.stride,
        "padding": tuple(before for before, _ in geometry.padding),
        "groups": geometry.groups,
        "bias": False,
    }


def _parametrized(layer: nn.Module, weight: Tensor, calls: int) -> Trial:
    """A layer whose weight is normalised whenever it is read, in training mode."""
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(weight)  # type: ignore[union-attr,operator]
    return Trial(lambda: layer.weight, calls)


def _torch(operator: ConvOperator) -> Trial:
    layer = CONVOLUTIONS[operator.geometry.dim](**_arguments(operator.geometry))
    nn.utils.parametrizations.spectral_norm(layer)
    return _parametrized(layer, operator.weight, CALLS)


def _torchlip(operator: ConvOperator, **options: Any) -> Trial:
    arguments = _plane(operator, "deel-torchlip")
    from deel.torchlip import SpectralConv2d

    return _parametrized(SpectralConv2d(**arguments, **options), operator.weight, CALLS)


def _get_conv_sv(operator: ConvOperator, agg_groups: bool) -> Trial:
    arguments = _plane(operator, "orthogonium")
    from orthogonium.layers.conv.singular_values import get_conv_sv

    layer = nn.Conv2d(**arguments)
    layer.weight.copy_(operator.weight)

    def call() -> Any:
        found = get_conv_sv(layer, n_iter=4, agg_groups=agg_groups, return_stab_rank=False)
        return found if agg_groups else torch.stack(found).amax()

    return Trial(call)


def _aol(operator: ConvOperator) -> Trial:
    arguments = _plane(operator, "orthogonium")
    from orthogonium.layers.conv.AOL import AOLConv2D

    return _parametrized(AOLConv2D(**arguments), operator.weight, 1)


def _normflows(operator: ConvOperator) -> Trial:
    arguments = _plane(operator, "normflows")
    from normflows.nets.lipschitz import InducedNormConv2d

    layer = InducedNormConv2d(**arguments, n_iterations=5)  # as many as LipschitzCNN takes
    if layer.weight.shape != operator.weight.shape:
        raise Refused(f"InducedNormConv2d drops groups={operator.geometry.groups} without a word: it is a dense layer")
    layer.weight.copy_(operator.weight)
    layer(operator.weight.new_zeros(1, *operator.geometry.shapes[0]))  # sets the input size, and never again

    def call() -> Tensor:
        layer.compute_weight(update=True)
        return layer.scale

    return Trial(call, CALLS)


CONTENDERS = {
    "auto": Contender("ours", partial(_method, auto)),
    "FourierBound": _ours(FourierBound()),
    "Exact": _ours(Exact()),
    "GramIteration": _ours(GramIteration()),
    "PowerIteration, proved": _ours(PowerIteration(eps=1e-3, prove=True), warm=True),
    "Runkel2021": _published(baselines.Runkel2021(), warm=True),
    "Miyato2018": _published(baselines.Miyato2018(), warm=True),
    "Farnia2018": _published(baselines.Farnia2018(), warm=True),
    "Ryu2019": _published(baselines.Ryu2019()),
    "Tsuzuku2018": _published(baselines.Tsuzuku2018()),
    "Sedghi2019": _published(baselines.Sedghi2019()),
    "Singla2021": _published(baselines.Singla2021()),
    "Araujo2021": _published(baselines.Araujo2021()),
    "Prach2022": _published(baselines.Prach2022()),
    "Delattre2023": _published(baselines.Delattre2023()),
    "Delattre2024": _published(baselines.Delattre2024()),
    "Delattre2024, bridge": _published(baselines.Delattre2024(bridge=True)),
    "Grishina2024": _published(baselines.Grishina2024()),
    "torch spectral_norm": Contender("package", _torch),
    "deel-torchlip": Contender("package", _torchlip),
    "deel-torchlip, no Björck": Contender("package", partial(_torchlip, eps_bjorck=None)),
    "orthogonium get_conv_sv": Contender("package", partial(_get_conv_sv, agg_groups=True)),
    "orthogonium get_conv_sv, max": Contender("package", partial(_get_conv_sv, agg_groups=False)),
    "orthogonium AOL": Contender("package", _aol),
    "normflows": Contender("package", _normflows),
}
