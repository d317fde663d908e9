"""Views, permutations, slices, copies, padding: every output is one of the inputs, or a constant.

‖R‖₂ = √m where m is how often the most used input is used, ‖R‖₁ = m, ‖R‖∞ = 1. The multiplicity is counted by running
the operation itself on the positions of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opnorm.rules.expression import Apply, Value
from opnorm.rules.factors import Blockwise, Factor, Relabel
from opnorm.rules.registry import Call, Refused, aten, concrete, dimension, lipschitz_rule


@lipschitz_rule(*aten(
    "clone.default", "contiguous.default", "alias.default", "detach.default", "lift_fresh_copy.default", "to.dtype",
    "to.dtype_layout", "to.device", "_to_copy.default", "dropout_.default", "type_as.default", "copy.default",
    "to.other", "float.default", "_assert_tensor_metadata.default",
))  # fmt: skip
def same(call: Call) -> Any:
    """x ↦ x; conversions to another precision count as exact, as all arithmetic of the network does."""
    dtype = call.arguments.get("dtype")
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise Refused(f"a conversion to {dtype} jumps, so that it has no Lipschitz constant")
    value = call.arguments.get("self", call.arguments.get("src"))
    if "copy.default" in str(call.target) and "_to_copy" not in str(call.target) and "fresh" not in str(call.target):
        value = call["src"]
    if not isinstance(value, Value):
        raise Refused("the value that it copies from does not depend on the input, while another argument does")
    return value


@lipschitz_rule(*aten(
    "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "squeeze.dim",
    "squeeze.dims", "squeeze.default", "unsqueeze.default", "pixel_shuffle.default", "pixel_unshuffle.default",
    "flip.default", "roll.default", "channel_shuffle.default", "view_as.default", "reshape_as.default", "ravel.default",
    "rot90.default", "unsafe_chunk.default", "view_copy.default", "unsqueeze_copy.default", "squeeze_copy.dim",
))  # fmt: skip
def rearrangement(call: Call) -> Factor:
    """A bijection: ‖R‖ = 1 in every norm."""
    return Relabel(_move(call), call.operand.shape)


@lipschitz_rule(
    *aten(
        "permute.default",
        "transpose.int",
        "t.default",
        "movedim.int",
        "movedim.intlist",
        "numpy_T.default",
        "mT.default",
        "permute_copy.default",
        "transpose_copy.int",
        "swapaxes.default",
        "moveaxis.int",
    )
)
def permutation(call: Call) -> Factor:
    """A bijection, and which: diagonals pass through it."""
    n = call.operand.ndim
    probe = _move(call)(torch.empty([i + 2 for i in range(n)], device="meta"))
    return Relabel(_move(call), call.operand.shape, dims=tuple(s - 2 for s in probe.shape))


@lipschitz_rule(
    *aten("slice.Tensor", "select.int", "narrow.default", "diagonal.default", "slice_copy.Tensor", "select_copy.int")
)
def part(call: Call) -> Factor:
    """A part of the entries, each once."""
    return Relabel(_move(call), call.operand.shape, taken=_range(call))


@lipschitz_rule(
    *aten(
        "split.Tensor",
        "chunk.default",
        "split_with_sizes.default",
        "split.sizes",
        "tensor_split.sections",
        "split_with_sizes_copy.default",
        "unbind.int",
        "unsafe_split.Tensor",
        "split_copy.Tensor",
        "unsafe_chunk.default",
    )[:-1]
)
def split(call: Call) -> tuple[Value, ...]:
    """Parts that share no entry."""
    operand = call.only("self")
    dim = dimension(call["dim"], operand.ndim)
    unbind = "unbind" in call.target._schema.name
    start, parts, move = 0, [], _move(call)
    for index, shape in enumerate(call.shape):
        length = 1 if unbind else shape[dim]
        if length is None:
            raise Refused("splitting needs to know the size of the dimension; certify at a fixed input size")
        factor = Relabel(_pick(move, index), operand.shape, taken=(dim, start, start + length))
        parts.append(Apply(shape, call.where, factor, operand))
        start += length
    return tuple(parts)


@lipschitz_rule(*aten(
    "expand.default", "repeat.default", "expand_as.default", "index_select.default", "tile.default", "index.Tensor",
    "repeat_interleave.self_int", "gather.default", "unfold.default", "im2col.default", "upsample_nearest1d.default",
    "upsample_nearest2d.default", "upsample_nearest3d.default", "upsample_nearest1d.vec", "upsample_nearest2d.vec",
    "upsample_nearest3d.vec", "_upsample_nearest_exact1d.default", "_upsample_nearest_exact2d.default",
    "_upsample_nearest_exact3d.default", "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec",
    "_upsample_nearest_exact3d.vec", "tril.default", "triu.default", "expand_copy.default", "unfold_copy.default",
))  # fmt: skip
def copies(call: Call) -> Factor:
    """√m for an input that is used up to m times."""
    if any(isinstance(v, Value) for name, v in call.arguments.items() if name not in ("self", "input")):
        raise Refused("its indices depend on the input, so that it may jump")
    shape = concrete(call.operand.shape, "counting copies")
    upsampling = "upsample" in call.target._schema.name
    counted = _multiplicity(_move(call), (1, 1, *shape[2:]) if upsampling else shape)
    if upsampling:  # all channels alike
        forward, n = _move(call), len(shape)
        constant = Relabel(forward, shape, counted).alone(call.ord).value
        return Blockwise(constant, frozenset((0, 1)), n, forward, method="multiplicity")
    return Relabel(_move(call), shape, counted)


@lipschitz_rule(*aten(
    "pad.default", "constant_pad_nd.default", "reflection_pad1d.default", "reflection_pad2d.default",
    "reflection_pad3d.default", "replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default",
))  # fmt: skip
def padding(call: Call) -> Factor:
    """1 with a constant, √m otherwise, m a product over the dimensions."""
    operand, pad = call.operand, list(call.arguments.get("pad", call.arguments.get("padding")))
    mode = call.arguments.get("mode") or call.target._schema.name.split("::")[1].split("_")[0]
    touched = len(pad) // 2
    shape = operand.shape
    if mode == "constant":
        multiplicity = 1
        if isinstance(call["value"], Value):
            raise Refused("it pads with a value that depends on the input")
    else:
        sizes = concrete(shape[operand.ndim - touched :], f"{mode} padding")
        lead = (1,) * (operand.ndim - touched)
        multiplicity = _multiplicity(_move(call), (*lead, *sizes))
    if touched <= operand.ndim - 2:
        constant = Relabel(_move(call), shape, multiplicity).alone(call.ord).value
        return Blockwise(constant, frozenset((0, 1)), operand.ndim, _move(call), method="multiplicity")
    return Relabel(_move(call), shape, multiplicity)


def _multiplicity(move: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> int:
    """How often the most used input appears among the outputs."""
    count = math.prod(shape)
    if count == 0:
        return 0
    positions = torch.arange(1, count + 1, dtype=torch.float64).reshape(shape)  # 0 is left for what padding puts in
    used = move(positions).reshape(-1).round().long()
    return int(torch.bincount(used, minlength=count + 1)[1:].max())


def _move(call: Call) -> Callable[[Tensor], Tensor]:
    """The operation as a function of the one argument that depends on the input."""
    arguments, operand, target = call.arguments, call.operand, call.target

    def move(x: Tensor) -> Tensor:
        return target(**{name: _replaced(value, operand, x) for name, value in arguments.items()})

    return move


def _replaced(value: Any, operand: Value, x: Tensor) -> Any:
    if value is operand:
        return x
    return [_replaced(v, operand, x) for v in value] if isinstance(value, list) else value


def _pick(move: Callable[[Tensor], Any], index: int) -> Callable[[Tensor], Tensor]:
    return lambda x: move(x)[index]


def _range(call: Call) -> tuple[int, int, int] | None:
    """(dim, start, stop) of a slice; None where it is not a plain one."""
    operand, name = call.operand, call.target._schema.name
    if "diagonal" in name:
        return None
    dim = dimension(call["dim"], operand.ndim)
    n = operand.shape[dim]
    if n is None:
        return None
    if "select" in name:
        start = int(call["index"]) % n
        return dim, start, start + 1
    if "narrow" in name:
        start = int(call["start"]) % max(n, 1)
        return dim, start, start + int(call["length"])
    start, stop, step = (call[k] for k in ("start", "end", "step"))
    start, stop, step = slice(start, stop, step).indices(n)
    return dim, start, stop
