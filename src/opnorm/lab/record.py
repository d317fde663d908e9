"""`environment` and `write_json`: what a result needs to be reproduced, and a file that is whole or not there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import opnorm

GIT = 60.0  # seconds that git has to answer; a machine that is busy, or a disk far away, may need some


def environment(command: Sequence[str], seed: int | None = None) -> dict[str, Any]:
    """What a result depends on beside its inputs: versions, machine, commit, command line and seed.

    Args:
        command: the arguments of `opnorm`, command first; with them and the commit the run can be repeated.
        seed: the seed, where there is one.
    """
    return {
        "command": shlex.join(["opnorm", *command]),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "opnorm": opnorm.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str | None:
    """The commit of opnorm's own source, with "+changes" if files differ from it.

    An installed copy may lie inside somebody else's checkout, so that git is asked whether it tracks this very file.
    A copy without its history, on a machine that only computes, is told by OPNORM_COMMIT; else there is None.
    """
    here = Path(__file__).resolve()
    if _git("ls-files", "--error-unmatch", here.name, at=here.parent) is None:
        return os.environ.get("OPNORM_COMMIT")
    found = _git("rev-parse", "HEAD", at=here.parent)
    package = str(here.parents[1])  # and not the results beside it, which an experiment before may have written
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", package, at=here.parent)
    return found and (found if changes == "" else f"{found}+changes")  # also where it could not be found out


def write_json(path: str | os.PathLike[str], results: Any) -> None:
    """Write results as JSON so that at every moment `path` holds either the old file or the whole new one."""
    write_text(path, json_text(results))


def json_text(results: Any) -> str:
    """Results as JSON, short lists of numbers on one line.

    Tensors, paths, dataclasses and dtypes are accepted. Numbers that JSON lacks become the strings "nan", "inf" and
    "-inf", which `float()` reads: a run that diverged is a result too.
    """
    text = json.dumps(plain(results), indent=1, ensure_ascii=False, allow_nan=False)
    numbers = re.compile(r'\[\n([^][{}"]*)\n *\]')  # no quote in between, so that it is never inside a string
    return numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file under another name in the same folder, and rename it when all of it is on the disk."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """The same made of what JSON has."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _git(*arguments: str, at: Path) -> str | None:
    try:
        done = subprocess.run(  # without the lock on the index, in which somebody's commit would fail meanwhile
            ["git", "--no-optional-locks", "-C", str(at), *arguments],
            capture_output=True, text=True, timeout=GIT, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    """The model of the CPU, for figures that are times; `platform.processor()` says nothing of it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
