"""`operators_of`: model ↦ {layer name: ConvOperator}, each layer on the input size that it really gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator
from opnorm.tracing import Trace, eager_modules, in_parametrization, trace_calls, untouched

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
# The weights of layers with these hooks are plain attributes, which the hook writes before every forward pass.
_WEIGHT_HOOKS = (SpectralNorm, WeightNorm, BasePruningMethod)
Shape = Sequence[int | None]


class Operators(dict[str, ConvOperator]):
    """{key: ConvOperator} in the order of the first calls; a plain dict would lose what could not be covered.

    The key of a layer is its module name. A layer called on several sizes has one operator for each: `"name"` for the
    first, `"name@28×28"` for a further one; the norm of the layer is the largest of theirs.

    Attributes:
        left_out: {module name: reason} for the layers that forward never called, and for the convolutions and linear
            maps that were seen but have no layer's weight, so that nothing is missing without a word.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}
        self._module_names: dict[str, str] = {}

    def by_module(self) -> dict[str, list[ConvOperator]]:
        """{module name: its operators, one for each size}."""
        grouped: dict[str, list[ConvOperator]] = {}
        for key, operator in self.items():
            grouped.setdefault(self._module_names[key], []).append(operator)
        return grouped

    def _add(self, name: str, operator: ConvOperator) -> None:
        key = name
        if name in self:
            key = f"{name}@{'×'.join('any' if n is None else str(n) for n in operator.geometry.input_size)}"
        again, copies = key, 1
        while again in self:  # the same size with another stride or padding: a forward of the layer's own can do that
            copies += 1
            again = f"{key}#{copies}"
        self[again] = operator
        self._module_names[again] = name


def operators_of(
    model: nn.Module, input_shape: Shape | Tensor | Sequence[Shape | Tensor] | Mapping[str, Shape | Tensor] | None
) -> Operators:
    """{layer name: ConvOperator} for every convolution and linear layer that the forward pass of `model` calls.

    Input sizes are those of a forward pass on fake tensors, which have shapes and no memory. Nothing of the model
    changes: the pass is in eval mode, and flags, attributes, hooks, weights and random state are afterwards as before.
    The weight of an operator is the layer's own tensor, not a copy, and the effective one where it is parametrized,
    pruned or normalised; so norms are differentiable with respect to the model's parameters.

    Layers are nn.Conv1d/2d/3d, nn.ConvTranspose1d/2d/3d, nn.Linear and their subclasses. Nothing else has an operator
    here. What else was seen to be a convolution or a linear map is in `left_out`: torch.nn.functional called outside
    such a layer, the projections of nn.MultiheadAttention, recurrent layers, nn.Bilinear. Matrix products (`x @ W`),
    einsum, normalisation, embeddings and activations are not even looked at. A module that is registered under two
    names goes by the first.

    Args:
        model: the network, on any device but meta.
        input_shape: the shape of one input without its batch dimension, such as (3, 224, 224). A size of None stands
            for every size, and the layers whose input follows it get the input size None. Several inputs: a sequence
            of shapes, or a mapping from keywords. An example batch (a tensor) may stand for any of the shapes: for
            integer inputs, and where forward looks at values, which fake tensors lack: if every input is an example
            and the fake pass fails, a real one is made. None: no pass at all, each layer of the model on any size.

    Returns:
        A dict with an attribute `left_out` and a method `by_module`; see `Operators`.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 1))
        >>> {name: str(operator.geometry) for name, operator in operators_of(model, (3, 33, 33)).items()}
        {'0': 'dense 3→8, 3×3 on 33×33, stride 2×2', '2': 'pointwise 8→8, 1×1 on 16×16'}
    """
    layers = _layers(model)
    trace = _any_size(layers) if input_shape is None else trace_calls(model, layers, input_shape)
    found = Operators()
    with untouched(model):
        for name, geometries in trace.calls.items():
            weight = _effective_weight(layers[name])
            for geometry in dict.fromkeys(geometries):
                found._add(name, _operator(name, geometry, weight))
    uncalled = {name: _why_uncalled(model, name) for name in layers if name not in trace.calls}
    found.left_out = uncalled | trace.left_out
    return found


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by name, once it is sure that their weights have values."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(f"expected the network itself, got it wrapped in {type(model).__name__}; pass model.module")
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        got = type(model).__name__
        raise ValueError(f"expected an eager torch.nn.Module, got {got}; build the network and do not script it")
    named = dict(eager_modules(model))
    lazy = [name for name, m in named.items() if isinstance(m, LazyModuleMixin) and m.has_uninitialized_params()]
    if lazy:
        raise ValueError(f"expected initialised layers, got {_listed(lazy)} still lazy; run the model on a batch first")
    layers = {name: m for name, m in named.items() if isinstance(m, LAYERS) and not in_parametrization(name)}
    meta = [name for name, layer in layers.items() if any(p.is_meta for p in layer.parameters())]
    if meta:
        raise ValueError(
            f"expected weights with values, got {_listed(meta)} on the meta device; call "
            "model.to_empty(device='cpu') and load a state dict first"
        )
    return dict(layers)


def _any_size(layers: dict[str, nn.Module]) -> Trace:
    return Trace({name: [ConvGeometry.from_module(layer, None)] for name, layer in layers.items()})


def _why_uncalled(model: nn.Module, name: str) -> str:
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "used inside nn.MultiheadAttention, which does not call it"
    return "never called by forward"


def _effective_weight(layer: nn.Module) -> Tensor:
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, _WEIGHT_HOOKS):
            hook(layer, ())  # else the attribute would be that of the last forward pass, older than the parameters
    return layer.weight  # type: ignore[return-value]


def _operator(name: str, geometry: ConvGeometry, weight: Tensor) -> ConvOperator:
    try:
        return ConvOperator(geometry, weight)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from error


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
