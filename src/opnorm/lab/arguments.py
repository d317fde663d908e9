"""Values that several commands take, read from text: shapes, methods, KEY=VALUE. A wrong one is a `UsageError`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import opnorm.norms
import opnorm.norms.baselines
from opnorm.bound import Method
from opnorm.lab.cli import UsageError

METHODS: dict[str, type[Method]] = {
    name: getattr(module, name)
    for module in (opnorm.norms, opnorm.norms.baselines)
    for name in module.__all__
    if isinstance(getattr(module, name), type)
}


def read_shapes(texts: Sequence[str]) -> list[tuple[int | None, ...]]:
    """One shape an input: `"3,224,224"`, `"3x224x224"`, or with `any` for a size, `"3,any,any"`."""
    return [_shape(text) for text in texts]


def read_method(text: str) -> Method | str:
    """`"auto"`, or the name of a method in either case, with settings or without: `"poweriteration(eps=1e-3)"`."""
    name, settings = _call(text)
    if name.lower() == "auto" and not settings:
        return "auto"
    kinds = {known.lower(): kind for known, kind in METHODS.items()}
    if name.lower() not in kinds:
        raise UsageError(f"expected --method among auto, {', '.join(METHODS)}, got {text!r}")
    kind = kinds[name.lower()]
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        fields = ", ".join(getattr(kind, "__dataclass_fields__", {})) or "none"
        raise UsageError(f"expected the settings of {kind.__name__} ({fields}), got {text!r}: {error}") from error


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`["width=32", "residual=mean"]` as {"width": 32, "residual": "mean"}: Python's literals, and else text."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"expected --arg KEY=VALUE, such as num_classes=10, got {text!r}")
        settings[key] = _literal(value)
    return settings


def _shape(text: str) -> tuple[int | None, ...]:
    try:
        sizes = [None if part.strip() == "any" else int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = [0]
    if any(size is not None and size < 1 for size in sizes):
        raise UsageError(
            f"expected --input as positive sizes without batch, such as 3,224,224 or 3,any,any, got {text!r}"
        )
    return tuple(sizes)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and keyword arguments of `text`, a name or a call with literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    except (SyntaxError, ValueError):
        pass
    return text.strip(), {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
