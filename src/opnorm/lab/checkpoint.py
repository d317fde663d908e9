"""`save` and `load`: everything that a run needs to go on, in a file that is whole at every moment."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opnorm.lab.cli import UsageError

FORMAT = 1


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint under another name in the same folder, and rename it when all of it is on the disk.

    Whatever happens meanwhile, a kill, a full disk, `path` holds the old checkpoint or the whole new one. The bytes are
    made in memory first, since torch's writer turns a full disk into errors of several kinds.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    write_bytes(path, buffer.getbuffer())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that at every moment `path` holds either the old one or the whole new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on the CPU; nothing in it can run code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"expected a checkpoint of opnorm train, got {path}, which cannot be read: {reason}"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UsageError(
            f"expected a checkpoint of format {FORMAT}, got {path} of {found}; use the version that wrote it"
        )
    return dict(content)


def remove_parts(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        part.unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """The state of every source of random numbers that a model may draw from, here and on the GPU in use."""
    version, numbers, gauss = random.getstate()
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": [version, list(numbers), gauss]}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the random numbers back where `random_state` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_initialized():  # a run may go on on another machine
        torch.cuda.set_rng_state(state["cuda"][0])


def _sync(folder: Path) -> None:
    """Have the new name on the disk too; where a folder cannot be opened, as on Windows, there is no need."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
