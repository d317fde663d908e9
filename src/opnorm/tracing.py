"""`trace_calls`: (model, input shapes) ↦ the geometry of each call of each layer, by a forward pass without memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from opnorm.geometry import ConvGeometry

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_SIGNATURES: dict[Callable, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONV),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
# Modules that hold linear maps and call no layer for them.
_LINEAR_INSIDE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
# Two sizes tell which layers follow the size of the input; multiples of 64 suit networks that halve and double again.
# The second pair is for audio, whose strides together can be longer than 256 samples.
_TRIAL_SIZES = ((256, 320), (4096, 5120))

Inputs = dict[int | str, Any]  # by position or keyword: a tuple of sizes, or an example batch


@dataclass
class Trace:
    """What a forward pass showed: the geometries of the calls of every layer, and what it saw besides."""

    calls: dict[str, list[ConvGeometry]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def trace_calls(model: nn.Module, layers: dict[str, nn.Module], input_shape: Any) -> Trace:
    """One pass, or, where sizes are None, one on each of two sizes: what differs between them has the size None."""
    inputs = _inputs(input_shape)
    if all(isinstance(x, Tensor) or None not in x for x in inputs.values()):
        return _forward(model, layers, inputs)
    refusals = []
    for pair in _TRIAL_SIZES:
        try:
            return _merged(*(_forward(model, layers, _filled(inputs, size)) for size in pair))
        except ValueError as error:
            refusals.append(error)
    raise ValueError(
        f"expected a model that accepts every size, since input_shape contains None; give the sizes: {refusals[0]}"
    ) from refusals[0]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; outside, every attribute of every module and the random state as before.

    Flags are set one by one, since some models override `eval()` to fuse weights. An attribute that forward assigns,
    say a cache, would otherwise hold a fake tensor for ever.
    """
    modules = [module for _, module in eager_modules(model)]
    saved = [(m.__dict__, dict(m.__dict__), _contents(m.__dict__)) for m in modules]
    python_state, caching = random.getstate(), parametrize._cache_enabled
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        if "torch._dynamo" in sys.modules:  # compiled code would read the memory that fake tensors do not have
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            parametrize._cache_enabled = 0  # a caller inside parametrize.cached() must not get our fake weights
            for module in modules:
                module.training = False
            yield
        finally:
            parametrize._cache_enabled = caching
            random.setstate(python_state)
            for attributes, before, contents in saved:
                _restore(attributes, before, contents)


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The named modules whose calls can be followed: those that torch.jit has not compiled."""
    return ((name, m) for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule))


def in_parametrization(name: str) -> bool:
    """Whether a module computes a weight rather than an activation."""
    return "parametrizations" in name.split(".")


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The containers among the attributes, each with a shallow copy."""
    return [(value, value.copy()) for value in attributes.values() if isinstance(value, dict | list | set)]


def _restore(attributes: dict[str, Any], before: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    attributes.clear()
    attributes.update(before)
    for container, content in contents:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)


def _inputs(input_shape: Any) -> Inputs:
    if isinstance(input_shape, Mapping):
        return {key: _shape(value) for key, value in input_shape.items()}
    several = isinstance(input_shape, Sequence) and any(isinstance(x, Sequence | Tensor) for x in input_shape)
    return dict(enumerate(map(_shape, input_shape if several else [input_shape])))


def _shape(value: Any) -> tuple[int | None, ...] | Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Sequence) and all(n is None or (hasattr(n, "__index__") and n > 0) for n in value):
        return tuple(None if n is None else n.__index__() for n in value)
    raise ValueError(
        "expected input_shape as positive sizes without batch, such as (3, 224, 224), or an example batch, or several "
        f"of these, got {value!r}"
    )


def _filled(inputs: Inputs, size: int) -> Inputs:
    return {k: x if isinstance(x, Tensor) else tuple(size if n is None else n for n in x) for k, x in inputs.items()}


def _merged(one: Trace, two: Trace) -> Trace:
    merged = Trace(left_out=one.left_out | two.left_out)
    for name in dict.fromkeys((*one.calls, *two.calls)):
        a, b = one.calls.get(name, []), two.calls.get(name, [])
        if len(a) == len(b):
            merged.calls[name] = [g for pair in zip(a, b, strict=True) for g in _where_equal(*pair)]
        else:  # how often the layer is called depends on the size, so no call has a counterpart
            merged.calls[name] = [geometry.at(None) for geometry in (*a, *b)]
    return merged


def _where_equal(a: ConvGeometry, b: ConvGeometry) -> tuple[ConvGeometry, ConvGeometry]:
    size = [m if m == n else None for m, n in zip(a.input_size, b.input_size, strict=True)]
    return a.at(size), b.at(size)


class _ForwardError(Exception):
    """What forward raised, and in which module."""


def _forward(model: nn.Module, layers: dict[str, nn.Module], inputs: Inputs) -> Trace:
    """The pass on fake tensors; if that fails and every input is an example, the real one."""
    try:
        return _fake_forward(model, layers, inputs)
    except _ForwardError as error:
        if all(isinstance(x, Tensor) for x in inputs.values()):
            return _real_forward(model, layers, inputs)
        shapes = ", ".join(str(tuple(x.shape) if isinstance(x, Tensor) else (1, *x)) for x in inputs.values())
        raise ValueError(
            f"expected a forward pass on inputs of shape {shapes} to succeed, got {error}; check input_shape, which "
            "has no batch dimension; if forward looks at values, which fake tensors lack, pass an example batch in "
            "place of each shape, as in operators_of(model, torch.randn(1, 3, 224, 224))"
        ) from error


def _fake_forward(model: nn.Module, layers: dict[str, nn.Module], inputs: Inputs) -> Trace:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    with untouched(model):
        # The mode would take real tensors too, but write into them what forward writes.
        _exchange_tensors(model, lambda tensor: mode.from_tensor(tensor if tensor.is_leaf else tensor.detach()))
        with mode:
            fakes = {
                key: mode.from_tensor(x) if isinstance(x, Tensor) else like.new_empty((1, *x))
                for key, x in inputs.items()
            }
            return _record(model, layers, fakes)


def _real_forward(model: nn.Module, layers: dict[str, nn.Module], inputs: Inputs) -> Trace:
    try:
        with untouched(model):
            _exchange_tensors(model, cache(torch.clone), parameters=False)
            return _record(model, layers, inputs)
    except _ForwardError as error:
        raise ValueError(f"expected a forward pass on the example batch to succeed, got {error}") from error


def _exchange_tensors(model: nn.Module, other: Callable[[Tensor], Tensor], *, parameters: bool = True) -> None:
    """Put other tensors in place of the model's own; to be used inside `untouched`, which puts them back."""
    for _, module in eager_modules(model):
        groups: list[dict[str, Any]] = [module.__dict__, module._buffers]
        for tensors in [*groups, module._parameters] if parameters else groups:
            tensors.update({name: other(t) for name, t in tensors.items() if isinstance(t, Tensor)})


def _record(model: nn.Module, layers: dict[str, nn.Module], inputs: Inputs) -> Trace:
    recorder = _Recorder(model, layers)
    args = [x for key, x in inputs.items() if isinstance(key, int)]
    kwargs = {key: x for key, x in inputs.items() if isinstance(key, str)}
    try:
        with torch.no_grad(), recorder:
            model(*args, **kwargs)
    except Exception as error:
        where = recorder.running[-1] if recorder.running else ""
        kind = type(model.get_submodule(where)).__name__
        raise _ForwardError(f"{type(error).__name__} in {where or 'the model'} ({kind}): {error}") from error
    return recorder.trace


class _Recorder(TorchFunctionMode):
    """Notes each convolution and linear map as it is computed, and in which module: what a layer does, not says.

    A subclass may pad its input or alter its weight in a forward of its own, and ConvTranspose takes an output size;
    then the attributes of the module would describe another operator than the one that runs.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]):
        super().__init__()
        self.layers = layers
        self.trace = Trace()
        self.running: list[str] = []
        self._computed_weights: dict[str, Tensor] = {}
        for name, module in eager_modules(model):  # `untouched` takes the hooks away
            module.register_forward_pre_hook(self._enter(name), prepend=True)
            module.register_forward_hook(self._leave(name))

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIGNATURES and self.running and not in_parametrization(self.running[-1]):
            self._see(func, dict(zip(_SIGNATURES[func], args, strict=False)) | (kwargs or {}))
        return result

    def _enter(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any) -> None:
            self.running.append(name)
            if isinstance(module, _LINEAR_INSIDE):
                self.trace.left_out[name] = f"{type(module).__name__} computes with its weights itself, not with layers"

        return hook

    def _leave(self, name: str) -> Callable:
        layer_of_weight = name.removesuffix("parametrizations.weight").removesuffix(".")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name.endswith("parametrizations.weight"):
                self._computed_weights[layer_of_weight] = output
            if name in self.layers and name not in self.trace.calls:
                reason = "its forward was not seen to use the layer's weight in a convolution or linear map"
                self.trace.left_out.setdefault(name, reason)
            self.running.pop()

        return hook

    def _see(self, func: Callable, call: dict[str, Any]) -> None:
        name, called = self.running[-1], func.__name__
        layer = self.layers.get(name)
        if layer is None:
            self.trace.left_out.setdefault(name, f"calls {called} itself, and only layers are covered")
        elif not self._is_weight(name, layer, call["weight"]):
            self.trace.left_out[name] = f"its forward calls {called} with another tensor than the layer's weight"
        else:
            self.trace.calls.setdefault(name, []).append(_geometry(func, layer, call))

    def _is_weight(self, name: str, layer: nn.Module, weight: Tensor) -> bool:
        own = layer._parameters.get("weight"), layer.__dict__.get("weight"), self._computed_weights.get(name)
        return any(weight is tensor for tensor in own)


def _geometry(func: Callable, layer: nn.Module, call: dict[str, Any]) -> ConvGeometry:
    rows, columns, *kernel = call["weight"].shape
    if func is F.linear:
        return ConvGeometry(columns, rows, (), ())
    size = tuple(call["input"].shape[-len(kernel) :])
    if getattr(layer, "padding_mode", "zeros") != "zeros" and _pads_as_torch(layer):
        whole = ConvGeometry.from_module(layer, None)  # the call comes after the padding, the layer begins before it
        return whole.at([n - a - b for n, (a, b) in zip(size, whole.padding, strict=True)])
    transposed, groups = _SIGNATURES[func] is _TRANSPOSED, call.get("groups", 1)
    channels = (rows, columns * groups) if transposed else (columns * groups, rows)
    settings = {key: call[key] for key in ("stride", "padding", "dilation", "output_padding") if key in call}
    return ConvGeometry(*channels, kernel, size, groups=groups, transposed=transposed, **settings)


def _pads_as_torch(layer: nn.Module) -> bool:
    """Whether forward is torch's own, which pads before it convolves where the padding is not of zeros."""
    base: Any = next((cls for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, cls)), None)
    kind: Any = type(layer)
    return base is not None and kind.forward is base.forward and kind._conv_forward is base._conv_forward
