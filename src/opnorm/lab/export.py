"""`opnorm export`: a trained network as a file for other programs, read back before it is put in its place."""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

import opnorm
from opnorm.lab.arguments import read_settings, read_shapes
from opnorm.lab.checkpoint import write_bytes
from opnorm.lab.cli import UsageError, parse
from opnorm.lab.export_formats import FORMATS, ONNX, Format, difference
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.train_model import Standardize, factory_settings
from opnorm.lab.trained import Trained, run_or_model

PROGRAM = "opnorm export"
ROUNDING = 1e-4  # the largest difference of two outputs, as a part of the largest output, that is still rounding
PIXELS = "pixels from 0 to 1"


@dataclass(frozen=True)
class Export:
    """Write a trained network for other programs, with plain weights and without opnorm, and check what was written.

    The ending of the file says what: .onnx is the whole network; .safetensors and .pt are its weights, a state dict.

    For example:
      opnorm export runs/NAME --to model.onnx
      opnorm export runs/NAME --to weights.safetensors
      opnorm export ds_resnet34 --checkpoint weights.pt --input 3,32,32 --to model.onnx
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The folder that `opnorm train` wrote; or a model, a built-in name, package.module:factory or file.py:factory."""

    to: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The file to write, .onnx, .safetensors or .pt. It is read back, and its outputs are compared."""

    standardize: bool = True
    """For the .onnx of a run: leave the standardisation of the pixels, (pixel - mean)/std, out of it. By default it is
    the first operation, so that the file takes pixels from 0 to 1, for which the certificate of the run holds."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The weights of a model: a .safetensors file, or a state dict saved by torch."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory. May be repeated."""

    input: Annotated[str | None, tyro.conf.arg(metavar="SIZES")] = None
    """With a model: the shape of an input without batch, as 3,32,32."""


@dataclass(frozen=True)
class Source:
    """What is written.

    Attributes:
        network: with plain weights, in eval mode.
        shape: of an input, without the batch.
        takes: what an input is, for a person.
        facts: what the file is, as text by name; it goes into the file where its format has a place for it.
    """

    network: nn.Module
    shape: tuple[int, ...]
    takes: str
    facts: dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Run `opnorm export`."""
    config = parse(Export, argv, PROGRAM)
    _check(config)
    run = run_or_model(config.run)
    source = _of_run(config, run) if run else _of_model(config)
    form = FORMATS[config.to.suffix]
    content = form.write(source.network, source.shape, source.facts | {"takes": source.takes})
    try:
        apart, how = _put(content, config.to, form, source)
    except Different as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    shape = "×".join(map(str, source.shape))
    print(f"{form.says}; an input is {shape}, {source.takes}")
    print(f"checked {how}: " + (f"outputs differ by at most {apart:.1e} of the largest" if apart else "same outputs"))
    print(f"written to {config.to}, {len(content):,} bytes")
    return 0


class Different(Exception):
    """What was read back computes something else."""


def _put(content: bytes, path: Path, form: Format, source: Source) -> tuple[float, str]:
    """Write under another name, read that back, and rename it; by how much the outputs differ, and how it was found."""
    part = path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        write_bytes(part, content)
        apart, how = difference(form, source.network, part, source.shape)
        if not apart <= ROUNDING:
            raise Different(
                f"expected the same outputs to rounding, got a difference of {apart:.2g} of the largest, {how}; "
                f"{path} is as it was before"
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return apart, how


def _check(config: Export) -> None:
    """What can be wrong is said before anything is computed."""
    if config.to.suffix not in FORMATS:
        raise UsageError(f"expected --to as a file that ends in {', '.join(FORMATS)}, got {config.to}")
    if config.to.is_dir() or not config.to.parent.is_dir():
        raise UsageError(f"expected --to as a file in a folder that exists, got {config.to}")
    if not config.standardize and config.to.suffix != ONNX:
        raise UsageError(f"expected --no-standardize with {ONNX}, got {config.to}, which holds the weights alone")


def _of_run(config: Export, run: Trained) -> Source:
    if config.checkpoint or config.arg or config.input:
        raise UsageError(
            f"expected --checkpoint, --arg and --input with a model, got them with the run {config.run}, which has them"
        )
    if run.config.normalize:
        norms = {"K": run.config.K, "K_per": run.result["K_per"], "scaling": run.config.scaling}
    else:
        norms = {"K": None}
    facts = _facts(run.config.model, factory_settings(run.config, len(run.classes), run.shape), run.shape)
    facts |= _texts(norms | {"mean": run.mean, "std": run.std, "classes": run.classes})
    facts |= _texts({"bound": run.result["bound"], "bound_is_of": f"(pixel - mean)/std, then the model, for {PIXELS}"})
    facts |= {"trained_by": run.result["environment"]["command"]}
    if config.to.suffix == ONNX and config.standardize:
        pixels = Standardize(run.mean, run.std)
        return Source(nn.Sequential(OrderedDict(pixels=pixels, network=run.model)).eval(), run.shape, PIXELS, facts)
    takes = f"(pixel - mean)/std for {PIXELS}, mean {_numbers(run.mean)} and std {_numbers(run.std)}"
    return Source(run.model, run.shape, takes, facts)


def _of_model(config: Export) -> Source:
    if config.input is None:
        raise UsageError(f"expected --input with the model {config.run}, such as --input 3,32,32")
    if not config.standardize:
        raise UsageError(f"expected --no-standardize with a run, got the model {config.run}; leave it out")
    (shape,) = read_shapes([config.input])
    sizes = tuple(size for size in shape if size is not None)
    if len(sizes) < len(shape):
        raise UsageError(f"expected --input with a number for every size, got {config.input}")
    settings = read_settings(config.arg)
    model = build_model(config.run, settings, seed=0).eval()
    if config.checkpoint is not None:
        load_checkpoint(model, config.checkpoint)
    _bake(model)
    _require_fit(model, config, sizes)
    takes = "as the model takes it" + ("" if config.checkpoint else "; weights as built, seed 0")
    return Source(model, sizes, takes, _facts(config.run, settings, sizes))


def _facts(model: str, settings: dict[str, Any], shape: Sequence[int]) -> dict[str, str]:
    return {"opnorm": opnorm.__version__, "model": model} | _texts({"arguments": settings, "input": shape})


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


@torch.no_grad()
def _bake(model: nn.Module) -> None:
    """Put the weights that parametrizations compute into plain modules."""
    for module in model.modules():
        for name in [*module.parametrizations] if is_parametrized(module) else ():  # type: ignore[misc]
            remove_parametrizations(module, name, leave_parametrized=True)


@torch.no_grad()
def _require_fit(model: nn.Module, config: Export, shape: Sequence[int]) -> None:
    """Refuse a model that does not take such inputs, or returns something else than a tensor."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    try:
        output = model(torch.zeros(2, *shape, dtype=dtype))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason, sizes = str(error).partition("\n")[0], "×".join(map(str, shape))
        raise UsageError(f"expected a model for inputs of {sizes}, got {config.run}: {reason}; see --arg") from error
    if not isinstance(output, Tensor):
        raise UsageError(f"expected a model that returns a tensor, got {type(output).__name__} from {config.run}")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
