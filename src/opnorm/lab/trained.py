"""`trained_in`: the network that `opnorm train` left in a folder, with what is needed to use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from opnorm.lab.cli import UsageError
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.train_config import Train, from_dict
from opnorm.lab.train_model import factory_settings
from opnorm.models import MODELS

RESULT, CONFIG, WEIGHTS = "result.json", "config.json", "model.safetensors"


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        model: the network with its weights, in eval mode; it gets standardised images.
        config: the settings of the run.
        result: what the run found, as in `result.json`.
        classes: their names, in the order of the logits.
        shape: (C, H, W) of an image.
        mean, std: per channel; the network gets (pixel - mean)/std.
    """

    model: nn.Module
    config: Train
    result: dict[str, Any]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def is_run(folder: Path) -> bool:
    """Whether there is a run in this folder, finished or not."""
    return (folder / CONFIG).is_file() or (folder / RESULT).is_file()


def run_or_model(text: str) -> Trained | None:
    """The run in the folder of this name; None where the text says how a model is built, by `build_model`."""
    if is_run(Path(text)):
        return trained_in(Path(text))
    if ":" in text or text in MODELS:
        return None
    raise UsageError(
        f"expected the folder of a run of opnorm train, or a model as one of {', '.join(MODELS)}, "
        f"package.module:factory or file.py:factory, got {text!r}"
    )


def trained_in(folder: Path) -> Trained:
    """The network of the run in this folder; a `UsageError` says why there is none."""
    result = _result(folder)
    if result["status"] != "finished":
        raise UsageError(f"expected a run that has finished, got {folder}, which diverged: {result['reason']}")
    config, data = from_dict(result["config"]), result["data"]
    shape = data["shape"]
    model = build_model(config.model, factory_settings(config, len(data["classes"]), shape), config.seed)
    load_checkpoint(model, folder / WEIGHTS)
    parts: dict[str, Any] = {key: tuple(data[key]) for key in ("classes", "shape", "mean", "std")}
    return Trained(model.eval(), config, result, **parts)


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    if not path.is_file() and is_run(folder):
        raise UsageError(
            f"expected a run that has finished, got {folder} without {RESULT}; opnorm train --resume {folder} goes on"
        )
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if result["status"] == "finished":
            result["config"], result["data"]["shape"]
    except OSError as error:
        raise UsageError(f"expected the folder of a run of opnorm train, got {folder} without {RESULT}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected the result of a run in {path}, got something else: {error!r}") from error
    return result
