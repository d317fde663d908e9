"""The formats of `opnorm export`: how a network becomes the bytes of a file, and how a file is run again."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opnorm.lab.cli import UsageError
from opnorm.lab.loading import load_checkpoint

ONNX = ".onnx"
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        says: what such a file holds, for a person.
        write: (network, shape of an input without the batch, facts) -> the content.
        read: (network, file) -> the function that the file computes, and how that was found; of the network nothing
            is used but what the file lacks.
    """

    says: str
    write: Callable[[nn.Module, Sequence[int], Mapping[str, str]], bytes]
    read: Callable[[nn.Module, Path], tuple[Function, str]]


@torch.no_grad()
def difference(form: Format, network: nn.Module, path: Path, shape: Sequence[int]) -> tuple[float, str]:
    """The largest difference of the outputs of a file from those of the network, relative to the largest; and how.

    On random inputs, in batches of one and of three, since a file must take any number.
    """
    function, how = form.read(network, path)
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    random = torch.Generator().manual_seed(0)
    found = []
    for batch in (1, 3):
        x = torch.rand(batch, *shape, generator=random).to(dtype)
        expected, got = network(x), function(x)
        apart = float((expected - got).abs().max()) if expected.shape == got.shape else float("nan")
        found.append(apart / max(float(expected.abs().max()), torch.finfo(dtype).tiny))
    return float(torch.tensor(found).max()), how


def _safetensors(network: nn.Module, shape: Sequence[int], facts: Mapping[str, str]) -> bytes:
    from safetensors.torch import save

    return save(_state(network), {"format": "pt", **facts})


def _torch_file(network: nn.Module, shape: Sequence[int], facts: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_state(network), buffer)
    return buffer.getvalue()


def _state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, each tensor with memory of its own, which safetensors asks for."""
    return {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in network.state_dict().items()}


@torch.no_grad()
def _loaded(network: nn.Module, path: Path) -> tuple[Function, str]:
    """A copy with the weights of the file; those that it had are gone before, so that none can stay."""
    model = copy.deepcopy(network)
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    load_checkpoint(model, path)
    return model, "by loading the file into the model"


def _onnx(network: nn.Module, shape: Sequence[int], facts: Mapping[str, str]) -> bytes:
    import onnx

    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    try:
        with _quiet():
            program = torch.onnx.export(
                network, (torch.zeros(2, *shape, dtype=dtype),), dynamo=True, verbose=False, input_names=["input"],
                output_names=["output"], dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UsageError(f"expected a network that can be written as ONNX, got one that cannot: {reason}") from error
    content: Any = program.model_proto if program is not None else None  # made anew each time it is asked for
    onnx.helper.set_model_props(content, {**facts})
    return bytes(content.SerializeToString())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what exporters say on the way, to loggers and to stderr; what goes wrong they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _onnx_function(network: nn.Module, path: Path) -> tuple[Function, str]:
    """By onnxruntime, where it is installed; else by the reference implementation that comes with onnx."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(str(path), full_check=True)
    if importlib.util.find_spec("onnxruntime") is None:
        run: Callable[..., Any] = ReferenceEvaluator(str(path)).run
        how = "with onnx's reference evaluator"
    else:
        import onnxruntime

        onnxruntime.set_default_logger_severity(3)
        run = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run
        how = f"with onnxruntime {onnxruntime.__version__}"
    return lambda x: torch.from_numpy(run(None, {"input": x.numpy()})[0]), how


FORMATS = {
    ONNX: Format("the whole network, for batches of any size", _onnx, _onnx_function),
    ".safetensors": Format("the weights, a state dict with the facts of the network beside it", _safetensors, _loaded),
    ".pt": Format("the weights, a state dict for torch.load with weights_only=True", _torch_file, _loaded),
}
