"""`read_grid`: the runs of `opnorm train` that a YAML file stands for, every setting of them checked by its parser."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opnorm.lab.cli import UsageError
from opnorm.lab.train_config import FREE, Train, read_config

PARTS = ("run", "grid")
OURS = {"out", "resume", "overwrite", "devices"}  # a run has a folder of its own, and one device
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Train) if field.name not in OURS}


@dataclass(frozen=True)
class Run:
    """One run of a grid.

    Attributes:
        name: what varies, as the name of a folder.
        cell: {setting that varies: its value in this run}.
        settings: all that the file says of it, as the file says it.
        config: the same, read and with what is left out.
    """

    name: str
    cell: dict[str, Any]
    settings: dict[str, Any]
    config: Train


def read_grid(path: Path, changes: Sequence[str] = ()) -> list[Run]:
    """The runs of a file, with `changes`, each KEY=VALUE, in place of what it says."""
    import yaml  # only here and for changes, so that what a sweep came to is shown without it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"expected the grid as a YAML file, got {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"expected YAML in {path}, got: {error}") from error
    try:
        return runs_of(content, changes)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def runs_of(content: Any, changes: Sequence[str] = ()) -> list[Run]:
    """The runs of {"run": {setting: value}, "grid": {setting: [values]}}, the last setting varying fastest."""
    fixed, grid = _parts(content)
    for change in changes:
        key, value = _change(change)
        (grid if key in grid else fixed)[key] = value
    _check(fixed, grid)
    runs = []
    for values in itertools.product(*grid.values()):
        settings = fixed | dict(zip(grid, values, strict=True))
        config = _read(settings, [*grid])
        cell = {name: getattr(config, name) for name in grid}
        runs.append(Run(name_of(cell), cell, settings, config))
    for name in grid:
        _refuse_repeated(name, grid[name], runs)
    return runs


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    """{"K": 5, "normalize": False, "radii": [0, 1]} as ["--K", "5", "--no-normalize", "--radii", "0", "1"]."""
    argv: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            if value != DEFAULTS[name]:  # only what is not the default is an option
                argv.append(f"--{option}" if value else f"--no-{option}")
        elif name == "arg":  # which is given again for each
            argv += [text for item in value for text in (f"--{option}", str(item))]
        elif value is not None:
            argv += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def label_of(value: Any) -> str:
    """A value as a person writes it: 5 and not 5.0."""
    if isinstance(value, list | tuple):
        return ",".join(map(label_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def name_of(cell: Mapping[str, Any]) -> str:
    """{"K": 5.0, "scaling": "hard"} as "K5-hard": numbers with their name, text by itself."""
    parts = (label_of(v) if isinstance(v, str | Path) else f"{name}{label_of(v)}" for name, v in cell.items())
    return "-".join(re.sub(r"[^\w.,=+-]+", "_", part) for part in parts).lstrip(".-")


def _parts(content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape = "a grid with the parts run: and grid:, settings of opnorm train by name"
    if not isinstance(content, dict):
        raise UsageError(f"expected {shape}, got {type(content).__name__}")
    if odd := [str(name) for name in content if name not in PARTS]:
        raise UsageError(f"expected {shape}, got the part {', '.join(odd)}")
    fixed, grid = (content.get(name) or {} for name in PARTS)
    if not isinstance(fixed, dict) or not isinstance(grid, dict) or not grid:
        raise UsageError(f"expected {shape}, and in grid: at least one list, such as K: [1, 2, 5]")
    return dict(fixed), dict(grid)


def _change(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"expected --set KEY=VALUE, such as epochs=10, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"expected --set KEY=VALUE with a value as in YAML, got {text!r}") from error


def _check(fixed: Mapping[str, Any], grid: Mapping[str, Any]) -> None:
    """Names, and what the arguments of a command line do not show: whether a value is a list, true, or nothing."""
    for name in (*fixed, *grid):
        if name in OURS:
            raise UsageError(f"expected settings without {name}, which is for the sweep to say, got it")
        if name not in DEFAULTS:
            near = difflib.get_close_matches(str(name), DEFAULTS, 1)
            hint = f"perhaps you meant {near[0]}" if near else "opnorm train --help shows them"
            raise UsageError(f"expected a setting of opnorm train, got {name!r}; {hint}")
    if both := [name for name in grid if name in fixed]:
        raise UsageError(f"expected each setting in run: or in grid:, got {both[0]} in both")
    for name, values in grid.items():
        if name in FREE:  # which tells no two runs apart
            raise UsageError(f"expected {name} in run:, since it does not change what is computed, got it in grid:")
        if not isinstance(values, list) or not values:
            raise UsageError(f"expected a list under grid: {name}, got {values!r}")
    for name, values in [*((name, [value]) for name, value in fixed.items()), *grid.items()]:
        for value in values:
            _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    default = DEFAULTS[name]
    if isinstance(default, bool):
        kind, right = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple):
        kind, right = "a list of numbers or texts", isinstance(value, list) and all(map(_is_plain, value))
    else:
        kind, right = "a number or a text", _is_plain(value) or value is default is None
    if not right:
        raise UsageError(f"expected {kind} for {name}, got {value!r}")


def _is_plain(value: Any) -> bool:
    """A number or a text, and not a text that a command line would take for an option."""
    return isinstance(value, int | float | str) and not isinstance(value, bool) and not str(value).startswith("--")


def _read(settings: Mapping[str, Any], varied: Sequence[str]) -> Train:
    try:
        return read_config(arguments_of(settings))
    except UsageError as error:
        raise UsageError(f"{error} (the run with {', '.join(f'{k}: {settings[k]}' for k in varied)})") from error


def _refuse_repeated(name: str, given: Sequence[Any], runs: Sequence[Run]) -> None:
    """Two values that are read as the same would be the same run twice."""
    distinct: list[Any] = []
    for run in runs:
        if run.cell[name] not in distinct:
            distinct.append(run.cell[name])
    if len(distinct) < len(given):
        raise UsageError(f"expected different values under grid: {name}, got {given}")
