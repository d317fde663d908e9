"""`build_model` and `load_checkpoint`: a model from what was typed, with weights from a file that cannot run code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opnorm.lab.cli import UsageError
from opnorm.models import MODELS

WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts put the state dict
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each name


def build_model(spec: str, settings: Mapping[str, Any], seed: int) -> nn.Module:
    """The built-in model of this name, or what `package.module:factory` or `path/to/file.py:factory` is or returns."""
    torch.manual_seed(seed)  # for a model that is made when its module is imported
    source, colon, attribute = spec.rpartition(":")
    factory = _attribute(_import(source), attribute, spec) if colon else _built_in(spec)
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise UsageError(f"expected {spec} to be a model or to return one, got {type(factory).__name__}")
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        raise UsageError(
            f"expected the arguments of {spec}, {inspect.signature(factory)}: {error}; use --arg"
        ) from error
    torch.manual_seed(seed)  # whatever the import has drawn
    model = factory(**settings)
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected {spec} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Load a state dict, strictly: safetensors, or a torch file of tensors alone."""
    state = _unwrapped(_read(path), path)
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # sizes; what is missing or unexpected is said below, shorter than torch does
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        raise UsageError(f"{path} does not fit the model: {_few(lines) if lines else error}") from error
    problems = {"missing": result.missing_keys, "not in the model": result.unexpected_keys}
    found = "; ".join(f"{what}: {_few(keys)}" for what, keys in problems.items() if keys)
    if found:
        raise UsageError(f"{path} does not fit the model: {found}")


def _built_in(name: str) -> Callable[..., nn.Module]:
    if name in MODELS:
        return MODELS[name]
    hint = "; a checkpoint goes with its model: MODEL --checkpoint FILE" if os.path.isfile(name) else ""
    raise UsageError(
        f"expected MODEL as one of {', '.join(MODELS)}, or as package.module:factory or file.py:factory, got {name!r}"
        + hint
    )


def _import(source: str) -> Any:
    """The module `package.module`, which may lie in the current directory, or the Python file."""
    if source.endswith(".py"):
        return _import_file(Path(source))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something that it imports
        raise UsageError(
            f"expected MODEL as an importable module:factory, got no module {error.name!r} in {os.getcwd()} or on the "
            "Python path"
        ) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"expected MODEL as file.py:factory, got no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as when Python runs it, so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _attribute(module: Any, attribute: str, spec: str) -> Any:
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        root = module.__name__.partition(".")[0]  # what is defined here, and not what is imported from elsewhere
        public = [name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(root)]
        raise UsageError(
            f"expected a model or a factory in {spec}, got no {attribute!r}; there are {_few(public)}"
        ) from error


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"expected --checkpoint as a file, got {path}, which is not there")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"expected a checkpoint of tensors alone, got {path}, which holds other objects or is no checkpoint; it is "
            "not loaded, since that could run code: save model.state_dict(), or a .safetensors file"
        ) from error
    except Exception as error:  # each format has its own errors for a file that is cut off or of another kind
        raise UsageError(f"expected a checkpoint, got {path}, which cannot be read: {error}") from error


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a training script saved, with the names that the bare model gives."""
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UsageError(f"expected a state dict in {path}, got {type(content).__name__}; save model.state_dict()")
    state = dict(content)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _few(items: Sequence[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
