"""Interpretation of a `torch.export` graph: constants are evaluated, everything else becomes a `Value`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from opnorm.rules.expression import Concat, Source, Value, Where
from opnorm.rules.factors import Relabel, Shape
from opnorm.rules.registry import Call, Refused, Unusable, aten, concrete, evaluate

_QUIET = (FutureWarning, DeprecationWarning, UserWarning)


@dataclass(frozen=True)
class Refusal:
    """An operation that has no bound, where it is, and why."""

    where: Where
    reason: str


@dataclass
class Network:
    """What the interpretation of a model gives: its outputs as values, and all that was refused."""

    source: Source
    outputs: list[Value]
    refusals: list[Refusal] = field(default_factory=list)
    sizes: str = ""
    order: list[str] = field(default_factory=list)

    @property
    def output(self) -> Value:
        """All outputs as one vector."""
        if len(self.outputs) == 1:
            return self.outputs[0]
        flat = tuple(_flattened(v) for v in self.outputs)
        return Concat((1, None), Where("outputs", "", "output"), flat, 1)


def exported(model: nn.Module, input_shape: Sequence[int | None], dtype: torch.dtype) -> torch.export.ExportedProgram:
    """The functional ATen graph of a model in eval mode, on one input of the given shape."""
    example = torch.zeros(1, *(n if n is not None else _example(i) for i, n in enumerate(input_shape)), dtype=dtype)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = example.to(device)
    free = [i + 1 for i, n in enumerate(input_shape) if n is None]
    options: dict[str, Any] = {}
    if free:
        options["dynamic_shapes"] = (dict.fromkeys(free, torch.export.Dim.AUTO),)
    with evaluating(model), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, (example,), strict=False, **options)
            if not all(_as_good_as_plain(node) for node in program.graph.nodes if _mutates(node)):
                _without_dropout(program.graph)
                program = program.run_decompositions({})  # in-place operations become plain ones; this takes long
        except Exception as error:
            raise ValueError(
                f"expected a model that torch.export can trace on an input of shape (1, "
                f"{', '.join('any' if n is None else str(n) for n in input_shape)}), got {type(error).__name__}: "
                f"{_first_line(error)}; see torch.export's documentation on control flow, or certify the part of it "
                "that computes tensors from one tensor"
            ) from error
    return program


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def interpreted(program: torch.export.ExportedProgram, input_shape: Sequence[int | None], ord: float) -> Network:
    """Every node of the graph as a constant, a value or a refusal."""
    state = _State(program, ord)
    with torch.no_grad():
        for node in program.graph.nodes:
            state.visit(node)
    network = Network(
        state.source, state.outputs, state.refusals, state.sizes(), [node.name for node in program.graph.nodes]
    )
    if None in input_shape and not state.refusals:
        _require_free(state.source, input_shape)
    return network


class _State:
    def __init__(self, program: torch.export.ExportedProgram, ord: float):
        self.program, self.ord = program, ord
        self.known: dict[Any, Any] = {}
        self.refusals: list[Refusal] = []
        self.outputs: list[Value] = []
        self.constants = _constants(program)
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The input."""
        if self._source is None:
            raise ValueError("expected a model that takes a tensor, got one without inputs")
        return self._source

    def visit(self, node: Any) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "get_attr":
            self.known[node] = _attribute(self.program.graph_module, node.target)
        elif node.op == "call_function":
            self.known[node] = self._call(node)
        elif node.op == "output":
            self._output(node)

    def _placeholder(self, node: Any) -> None:
        if node.name in self.constants:
            self.known[node] = self.constants[node.name]
            return
        shape = _shape(node.meta.get("val"))
        if self._source is not None:
            if shape is None:  # a flag or a number that was given no value
                self.known[node] = node.meta.get("val")
                return
            raise ValueError("expected a model with one input tensor, got several; wrap it in a module that takes one")
        self.known[node] = self._source = Source(shape or (), Where("input", "", node.name))

    def _call(self, node: Any) -> Any:
        args = torch.fx.node.map_arg(node.args, lambda n: self.known[n])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self.known[n])
        parts = list(_leaves((args, kwargs)))
        if not any(isinstance(p, (Value, Unusable)) for p in parts):
            return self._constant(node, args, kwargs)
        if getattr(node.target, "__name__", "") == "getitem":
            return args[0][args[1]]
        if not _holds_tensor(node.meta.get("val")):
            return node.meta.get("val")  # sizes, assertions
        where = Where(_name(node.target), _module_path(node), node.name)
        try:
            if node.target in _SHAPE_ALONE:
                return node.target(*_zeros_for_values(args), **kwargs)
            for part in parts:
                if isinstance(part, Unusable):
                    raise Refused(part.reason)
            target = _plain(node.target)
            arguments = tree_map_only(Tensor, Tensor.cpu, _bound(target, args, kwargs))  # rules never mix devices
            return evaluate(Call(target, where, arguments, self.ord, _shapes(node.meta["val"])))
        except Refused as refusal:
            self.refusals.append(Refusal(where, str(refusal)))
        except ValueError as error:
            self.refusals.append(Refusal(where, _first_line(error)))
        return _unknown(node.meta["val"], where)

    def _constant(self, node: Any, args: Any, kwargs: Any) -> Any:
        if not _holds_tensor(node.meta.get("val")):
            value = node.meta.get("val")
            if value is not None:
                return value
        if any(isinstance(p, torch.SymInt) for p in _leaves((args, kwargs))):
            where = Where(_name(node.target), _module_path(node), node.name)
            self.refusals.append(
                Refusal(where, "a constant whose shape depends on the input size; certify at a fixed one")
            )
            return _unknown(node.meta["val"], where)
        if _is_random(node.target, args, kwargs):
            where = Where(_name(node.target), _module_path(node), node.name)
            self.refusals.append(Refusal(where, "it is random, so that the network is another one at every call"))
            return _unknown(node.meta["val"], where)
        return node.target(*args, **kwargs)

    def _output(self, node: Any) -> None:
        specs = self.program.graph_signature.output_specs
        names = {s.arg.name for s in specs if str(s.kind).endswith("USER_OUTPUT") and hasattr(s.arg, "name")}
        for arg in torch.fx.node.map_arg(node.args[0], lambda n: (n.name, self.known[n])):
            if isinstance(arg, tuple) and arg[0] in names and isinstance(arg[1], Value):
                self.outputs.append(arg[1])

    def sizes(self) -> str:
        """The range of every size of the input that is left open, by its dimension."""
        node = next(n for n in self.program.graph.nodes if self.known.get(n) is self._source)
        sizes = enumerate(node.meta["val"].shape[1:])
        free = {dim: size.node.expr for dim, size in sizes if not isinstance(size, int) and _sole(size) is None}
        intervals = self.program.range_constraints
        return ", ".join(f"dimension {dim} {_interval(intervals.get(e), e)}" for dim, e in free.items())


def _interval(interval: Any, expression: Any) -> str:
    """The sizes that a dimension may have, in words."""
    if interval is None:  # a product or a sum of others
        return f"of the form {expression}"
    upper = str(interval.upper)
    return f"from {interval.lower}" + (f" to {upper}" if upper.isdigit() else " up")


def _require_free(source: Source, input_shape: Sequence[int | None]) -> None:
    fixed = [i for i, n in enumerate(input_shape) if n is None and source.shape[i + 1] is not None]
    if fixed:
        raise ValueError(
            f"expected a network for any size in dimension {', '.join(map(str, fixed))} of its input, got one "
            f"that torch.export traces at a fixed one only ({tuple(source.shape[1:])}); certify at that size"
        )


def _constants(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Parameters, buffers and lifted constants by the name of their placeholder."""
    signature = program.graph_signature
    result: dict[str, Any] = {}
    for table in (signature.inputs_to_parameters, signature.inputs_to_buffers):
        for name, target in table.items():
            result[name] = program.state_dict[target] if target in program.state_dict else program.constants[target]
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        result[name] = program.constants[target]
    return result


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _bound(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        raise Refused("it is not an ATen operation")
    bound = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def _shape(value: Any) -> Shape | None:
    if not isinstance(value, Tensor):
        return None
    return tuple(int(n) if isinstance(n, int) else _sole(n) for n in value.shape)


def _sole(size: Any) -> int | None:
    """The value of a symbolic size that can have only one; None where it is open."""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    expression = node.expr
    return int(expression) if expression.is_number else None


def _shapes(value: Any) -> Any:
    return [_shape(v) for v in value] if isinstance(value, (list, tuple)) else _shape(value)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value))


def _is_random(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers; dropout in eval mode does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    bound = _bound(target, args, kwargs)
    return bool(bound.get("train", bound.get("training", True)))


_SHAPE_ALONE = aten(
    "zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default",
    "new_full.default",
)  # fmt: skip


def _zeros_for_values(args: Sequence[Any]) -> list[Any]:
    """The arguments of an operation that looks at their shapes and precision alone."""
    return [torch.zeros(concrete(a.shape, "its result")) if isinstance(a, Value) else a for a in args]


def _unknown(value: Any, where: Where) -> Any:
    """A stand-in for the result of a refused operation, so that what follows is looked at too."""
    if isinstance(value, (list, tuple)):
        return tuple(_unknown(v, where) if isinstance(v, Tensor) else None for v in value)
    return Source(_shape(value) or (), where, known=False)


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)
    else:
        yield item


def _mutates(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _plain(target: Any) -> Any:
    """The operation that returns what an in-place one writes: relu for relu_."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    packet = getattr(torch.ops.aten, schema.name.split("::")[1].removesuffix("_"), None)
    return getattr(packet, schema.overload_name or "default", None)


def _as_good_as_plain(node: Any) -> bool:
    """Whether nobody can see that an operation works in place: nothing reads its operand later, under any name."""
    operand = node.args[0] if node.args else None
    if _plain(node.target) is None or not isinstance(operand, torch.fx.Node) or operand.op != "call_function":
        return False
    if _aliases(operand) and not (_mutates(operand) and _as_good_as_plain(operand)):
        return False
    return all(user is node or (user < node and not _aliases(user)) for user in operand.users)


def _without_dropout(graph: Any) -> None:
    """In eval mode dropout returns its very argument, which torch's decomposition of it copies: take it out."""
    for node in list(graph.nodes):
        if _name(node.target) in _DROPOUTS and node.op == "call_function" and not _bound_train(node):
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")


def _bound_train(node: Any) -> bool:
    return bool(_bound(node.target, node.args, node.kwargs).get("train", True))


_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


def _aliases(node: Any) -> bool:
    """Whether the result of a node may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns) or _maybe_view(schema.name)


def _maybe_view(name: str) -> bool:
    """Operations that return their argument, or a view of it, where they can, without saying so in their schema."""
    return name.split("::")[-1] in _SOMETIMES_VIEWS


_SOMETIMES_VIEWS = {
    "contiguous", "reshape", "flatten", "to", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
    "type_as", "_unsafe_view",
    "reshape_as", "chunk", "unflatten", "movedim", "ravel", "pad", "expand_as", "tensor_split", "swapaxes", "moveaxis",
    "numpy_T", "getitem", "concat", "atleast_1d", "squeeze", "float", "double", "narrow", "select", "interpolate",
}  # fmt: skip


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else getattr(target, "__name__", str(target))


def _module_path(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return paths[-1] if paths else ""


def _flattened(value: Value) -> Value:
    from opnorm.rules.expression import Apply

    factor = Relabel(lambda x: x.reshape(1, -1), value.shape)
    return Apply((1, None), Where("outputs", "", "output"), factor, value)


def _example(index: int) -> int:
    return (0, 96, 128, 64)[index] if 0 < index < 4 else 96


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
