"""`opnorm reproduce all`: every experiment in turn, unattended; after a kill the finished ones stay as they are."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from opnorm.lab.bench.timing import keep_memory
from opnorm.lab.cli import UsageError, parse
from opnorm.lab.paper import EXPERIMENTS
from opnorm.lab.paper.cells import forget_part, part_path, read_result, result_path
from opnorm.lab.paper.options import Options, WithImages, read_options
from opnorm.lab.paper.page import draw
from opnorm.lab.record import environment, write_json

WHAT = "all"
PROGRAM = f"opnorm reproduce {WHAT}"


@dataclass(frozen=True)
class Everything(WithImages):
    """All figures and tables of the paper, one after the other, then the page. Repeat the command after a kill.

    What is missing for some of them is said before anything begins.

    For example:
      opnorm reproduce all --profile small --data-path cifar-10-batches-bin --weights mobilenetv2.safetensors
    """

    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The weights of a trained MobileNetV2, batch norm folded into the convolutions, .safetensors."""

    without: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Experiments to leave out."""


def main(argv: Sequence[str]) -> int:
    """Run what is not finished, in order; the exit code of the first that fails."""
    options = parse(Everything, argv, PROGRAM)
    if unknown := [name for name in options.without if name not in EXPERIMENTS]:
        raise UsageError(f"expected --without among {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}")
    if options.torch_device.type == "cpu":
        keep_memory(["reproduce", WHAT, *argv])  # now, since timing would begin this process anew in its midst
    start = part_path(options.out, WHAT)
    names = [name for name in EXPERIMENTS if name not in options.without]
    left = [name for name in names if options.restart or not is_finished(name, options, start)]
    _check(left, options)
    if options.restart or not start.is_file():
        write_json(start, {"environment": environment(["reproduce", WHAT, *argv])})
    for name in names:
        number = f"{names.index(name) + 1} of {len(names)}, {name}"
        if name not in left:
            print(f"{number}: finished before")
            continue
        print(f"{number}: {EXPERIMENTS[name].summary}", flush=True)
        if code := int(_module(name).main(_arguments(name, options))):
            return code
    for name in names:
        forget_part(options.out, name)  # which a kill may have left beside its result
    draw(options.out, options.docs, names)
    start.unlink()
    return 0


def is_finished(name: str, options: Options, start: Path) -> bool:
    """Whether the result of an experiment, in this profile, was written since `start` was."""
    path = result_path(options.out, name)
    if not (start.is_file() and path.is_file()) or path.stat().st_mtime_ns < start.stat().st_mtime_ns:
        return False
    result = read_result(options.out, name)
    return result is not None and result["profile"] == options.profile


def _check(names: Sequence[str], options: Everything) -> None:
    """Refuse to begin where some experiment lacks something."""
    reasons = {}
    for name in names:
        module = _module(name)
        try:
            own = read_options(_kind(module), _arguments(name, options), f"opnorm reproduce {name}", module.PROFILES)
            getattr(module, "check", _nothing)(own)
        except UsageError as error:
            reasons[name] = str(error)
    if reasons:
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UsageError(
            f"expected what every experiment needs, got less; {found}. Give it, or --without {' '.join(reasons)}"
        )


def _arguments(name: str, options: Everything) -> list[str]:
    """Those of the given options that an experiment has, as its arguments."""
    usual, known = Everything(), {field.name for field in dataclasses.fields(_kind(_module(name)))}
    found = []
    for field in dataclasses.fields(options):
        value: Any = getattr(options, field.name)
        if field.name in known and value != getattr(usual, field.name):
            flag = f"--{field.name.replace('_', '-')}"
            found += [flag] if value is True else [flag, str(value)]
    return found


def _kind(module: ModuleType) -> type[Options]:
    """The options of an experiment: the one subclass of `Options` that its module defines."""
    own = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
    (kind,) = (value for value in own if isinstance(value, type) and issubclass(value, Options))
    return kind


def _module(name: str) -> ModuleType:
    return importlib.import_module(EXPERIMENTS[name].module)


def _nothing(options: Options) -> None:
    """Need nothing."""
