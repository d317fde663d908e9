"""Which layers, at which K, by which method: (model, policy) ↦ units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from opnorm.bound import Guarantee, Method
from opnorm.geometry import ConvGeometry
from opnorm.layers import operators_of
from opnorm.normalize.measure import Channels, Iterated, Measure, measure_for
from opnorm.normalize.scaling import SCALINGS, UPDATES, NormScale
from opnorm.normalize.units import Unit

Pattern = str | type
Limit = float | Mapping[str, float] | None
KINDS = ("linear", "pointwise", "depthwise", "grouped", "dense")


@dataclass(frozen=True)
class Policy:
    """The arguments of `Normalizer` but for the model and its inputs."""

    K: Limit
    lipschitz: float | None
    scaling: str
    update: str
    s_init: float
    include: tuple[Pattern, ...] | None
    exclude: tuple[Pattern, ...]
    method: Method | Mapping[str, Method] | None
    guarantee: Guarantee | None
    per_channel: bool
    joint: bool

    def __post_init__(self) -> None:
        _one_of("scaling", self.scaling, SCALINGS)
        _one_of("update", self.update, UPDATES)
        _one_of("guarantee", self.guarantee, (None, "upper"))
        if (self.K is None) == (self.lipschitz is None):
            raise ValueError(
                "expected either K, the norm of a layer, or lipschitz, that of the network; give one of them"
            )
        for value in (self.lipschitz, *(self.K.values() if isinstance(self.K, Mapping) else (self.K,))):
            if value is not None and not _positive(value):
                raise ValueError(f"expected K and lipschitz as finite numbers above 0, got {value!r}")
        if not isinstance(self.s_init, int | float) or not math.isfinite(self.s_init):
            raise ValueError(f"expected s_init as a finite number, got {self.s_init!r}; 3 starts at 0.995 K")
        if isinstance(self.method, Mapping):
            for kind in self.method:
                _one_of("the keys of method", kind, KINDS)
        if self.update == "differentiable" and (self.per_channel or self.joint):
            raise ValueError(
                "expected update='project' with per_channel or joint, got 'differentiable'; use one or the other"
            )

    def chooses(self, name: str, module: nn.Module | None) -> bool:
        """Whether a layer is included and not excluded."""
        included = self.include is None or _matches(self.include, name, module)
        return included and not _matches(self.exclude, name, module)


def patterns(value: Pattern | Iterable[Pattern] | None) -> tuple[Pattern, ...] | None:
    """One pattern or several as a tuple."""
    if value is None:
        return None
    return (value,) if isinstance(value, str | type) else tuple(value)


def units_of(model: nn.Module, shapes: Sequence[Any], policy: Policy) -> list[Unit]:
    """The units of a model, in the order of its first forward pass; nothing of the model changes."""
    geometries = _geometries(model, shapes, policy)
    layers = {name: model.get_submodule(name) for name in geometries}
    for name, layer in layers.items():
        _require_plain_weight(name, layer)
    tied: dict[int, list[str]] = {}
    for name, layer in layers.items():
        tied.setdefault(id(layer.weight), []).append(name)
    _require_no_other_holders(model, layers)
    limits = _limits(list(layers), policy, model, shapes)
    units = [_unit(names, layers, geometries, limits, policy) for names in tied.values()]
    if policy.per_channel and not any(unit.per_channel for unit in units):
        raise ValueError("expected a depthwise layer with per_channel=True, got none; leave per_channel out")
    if policy.joint:
        _pair(units, model, shapes)
    return units


def _geometries(model: nn.Module, shapes: Sequence[Any], policy: Policy) -> dict[str, tuple[ConvGeometry, ...]]:
    """{layer name: its geometries on all of the input shapes}."""
    found: dict[str, list[ConvGeometry]] = {}
    unreached: dict[str, str] = {}
    for shape in shapes:
        operators = operators_of(model, shape)
        for name, of_layer in operators.by_module().items():
            if policy.chooses(name, model.get_submodule(name)):
                found.setdefault(name, []).extend(o.geometry for o in of_layer)
        unreached |= {n: why for n, why in operators.left_out.items() if policy.chooses(n, model.get_submodule(n))}
    missing = {n: why for n, why in unreached.items() if n not in found}
    if missing:
        listed = "; ".join(f"{name!r}{'' if name else ', the model itself'}: {why}" for name, why in missing.items())
        raise ValueError(f"expected every layer to be reached in the forward pass, got {listed}; name these in exclude")
    if not found:
        raise ValueError(
            "expected at least one convolution or linear layer to normalise, got none; look at include and exclude"
        )
    return {name: tuple(dict.fromkeys(gs)) for name, gs in found.items()}


def _unit(
    names: list[str],
    layers: dict[str, nn.Module],
    geometries: dict[str, tuple[ConvGeometry, ...]],
    limits: dict[str, float],
    policy: Policy,
) -> Unit:
    if len({limits[name] for name in names}) > 1:
        raise ValueError(f"expected one K for layers that share a weight, got { ({n: limits[n] for n in names}) }")
    modules = tuple(layers[name] for name in names)
    every = tuple(dict.fromkeys(g for name in names for g in geometries[name]))
    weight = modules[0].weight
    assert isinstance(weight, Tensor)
    try:
        measure = _measure(every, policy)
        scale = NormScale(weight, limits[names[0]], policy.scaling, policy.update, policy.s_init, measure)
    except ValueError as error:
        raise ValueError(f"layer {names[0]!r}: {error}") from error
    per_channel = policy.per_channel and every[0].kind == "depthwise"
    if per_channel and not isinstance(measure, Channels):
        raise ValueError(
            f"expected a depthwise layer whose channels FourierBound measures, with per_channel=True, got {names[0]!r} "
            f"with {measure.method}; leave method out, and share no weight with another kind of layer"
        )
    return Unit(tuple(names), modules, scale, None, per_channel, policy.guarantee == "upper")


def _measure(geometries: tuple[ConvGeometry, ...], policy: Policy) -> Measure:
    method = policy.method
    if isinstance(method, Mapping):
        method = method.get(geometries[0].kind)
    return measure_for(geometries, method, policy.guarantee, policy.per_channel or policy.joint)


def _limits(names: list[str], policy: Policy, model: nn.Module, shapes: Sequence[Any]) -> dict[str, float]:
    """The K of each layer; a Lipschitz constant L for n layers one after the other is n times L^{1/n}."""
    if policy.lipschitz is not None:
        return dict.fromkeys(names, float(policy.lipschitz) ** (1 / _calls(model, shapes, names)))
    if not isinstance(policy.K, Mapping):
        assert policy.K is not None
        return dict.fromkeys(names, float(policy.K))
    limits = {}
    for name in names:
        fitting = [pattern for pattern in policy.K if fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"expected a pattern of K for every layer, got none for {name!r}; add '*' or exclude the layer"
            )
        limits[name] = float(policy.K[fitting[0]])
    idle = [p for p in policy.K if not any(fnmatchcase(name, p) for name in names)]
    if idle:
        raise ValueError(f"expected every pattern of K to name a layer, got {idle[0]!r}, which names none of {names}")
    return limits


def _calls(model: nn.Module, shapes: Sequence[Any], names: list[str]) -> int:
    """How many layers a forward pass calls, those that it calls again counted again."""
    calls: Counter[str] = Counter()
    most = Counter(names)  # where no pass shows more, each once
    handles = [model.register_forward_pre_hook(lambda module, args: calls.clear())]
    for name in names:
        layer = model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(lambda module, args, name=name: calls.update([name])))
    try:
        for shape in shapes:
            operators_of(model, shape)
            most |= calls
    finally:
        for handle in handles:
            handle.remove()
    return most.total()


def _pair(units: list[Unit], model: nn.Module, shapes: Sequence[Any]) -> None:
    """Link each pointwise unit to the depthwise unit whose output is all that it reads."""
    if shapes[0] is None:
        raise ValueError(
            "expected an input_shape with joint=True, got None; what follows what is seen in a forward pass"
        )
    by_name = {name: unit for unit in units for name in unit.names}
    for second, first in _read_by(model, shapes, by_name).items():
        before, after = by_name[first], by_name[second]
        depthwise = isinstance(before.measure, Channels) and before.geometry.weight_shape[:2] == (
            before.geometry.groups,
            1,
        )
        pointwise = isinstance(after.measure, Iterated) and after.measure.is_matrix and not after.geometry.transposed
        if (
            depthwise
            and pointwise
            and len(before.names) == len(after.names) == 1
            and after.geometry.kind == "pointwise"
        ):
            after.before = before
    if not any(unit.before for unit in units):
        raise ValueError(
            "expected a depthwise layer followed by a pointwise one with joint=True, got none; leave joint out"
        )


def _read_by(model: nn.Module, shapes: Sequence[Any], names: Iterable[str]) -> dict[str, str]:
    """{layer: the layer whose output, unchanged, is its input in every call}, from the forward pass itself."""
    outputs: dict[int, tuple[Any, int, str]] = {}
    read: dict[str, set[str | None]] = {}

    def enter(name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            tensor, version, source = outputs.get(id(x), (None, -1, ""))
            unchanged = tensor is not None and tensor is x and x._version == version
            read.setdefault(name, set()).add(source if unchanged else None)

        return hook

    def leave(name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[id(output)] = (output, output._version, name)  # held, so that no other tensor gets its id

        return hook

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        for shape in shapes:
            operators_of(model, shape)
    finally:
        for handle in handles:
            handle.remove()
    single = {name: next(iter(sources)) for name, sources in read.items() if len(sources) == 1}
    return {name: source for name, source in single.items() if source}


def _require_plain_weight(name: str, layer: nn.Module) -> None:
    if parametrize.is_parametrized(layer, "weight"):
        kinds = [type(p).__name__ for p in layer.parametrizations["weight"]]  # type: ignore[index]
        if NormScale.__name__ in kinds:
            raise ValueError(f"expected layers without a Normalizer, got {name!r} with one; call its remove() first")
        raise ValueError(
            f"expected a plain weight, got {name!r} parametrized by {kinds}; remove that or exclude the layer"
        )
    if "weight" not in layer._parameters:
        raise ValueError(
            f"expected a plain weight, got {name!r}, whose weight a hook computes (weight_norm, spectral_norm, "
            "pruning); remove the hook or exclude the layer"
        )
    if hasattr(layer.weight, "device_mesh"):
        raise ValueError(
            f"expected a whole weight, got {name!r} sharded; make the Normalizer before fully_shard(model)"
        )


def _require_no_other_holders(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    held = {id(layer.weight): name for name, layer in layers.items()}
    chosen = {id(layer) for layer in layers.values()}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in held and not (id(module) in chosen and key == "weight"):
                raise ValueError(
                    f"expected the weight of {held[id(parameter)]!r} to be used by normalised layers only, got "
                    f"{name}.{key} too, which would see it without its factor; exclude the layer"
                )


def _matches(chosen: tuple[Pattern, ...], name: str, module: nn.Module | None) -> bool:
    return any(fnmatchcase(name, p) if isinstance(p, str) else isinstance(module, p) for p in chosen)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"expected {name} in {allowed}, got {value!r}")
