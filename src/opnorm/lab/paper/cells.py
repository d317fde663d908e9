"""`Cells`: a result that grows cell by cell, so that a kill at any moment loses the cell it fell into and no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opnorm.lab.checkpoint import remove_parts
from opnorm.lab.cli import UsageError
from opnorm.lab.paper.options import Options, Profiles, settings_of
from opnorm.lab.record import environment, plain, write_json
from opnorm.lab.resumed import resumed

Result = dict[str, Any]


def result_path(out: Path, what: str) -> Path:
    """Where the result of an experiment is."""
    return out / f"{what}.json"


def part_path(out: Path, what: str) -> Path:
    """Where it is while it grows."""
    return out / f"{what}.part.json"


def compute(
    what: str,
    options: Options,
    argv: Sequence[str],
    cells: Mapping[str, Callable[[], Any]],
    *,
    profiles: Profiles,
    seed: int | None = None,
    about: Mapping[str, Any] | None = None,
) -> Result:
    """The result of an experiment, each of its cells computed unless it was before a kill.

    Args:
        what: the name of the experiment.
        options: how it was asked for.
        argv: the arguments of `opnorm` that it was asked by.
        cells: a function for each cell, by name.
        profiles: the settings of each profile, of which the result says where it differs.
        seed: what the random numbers follow from.
        about: more that belongs to the result, such as the data.
    """
    part = part_path(options.out, what)
    result = _begin(what, options, argv, profiles, seed, about or {})
    known = result["cells"]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=len(cells), completed=sum(name in known for name in cells))
        for name, cell in cells.items():
            progress.update(task, description=f"{what}: {name}")
            if name not in known:
                known[name] = plain(cell())
                write_json(part, result)
                progress.advance(task)
    result["cells"] = {name: known[name] for name in cells}
    write_json(result_path(options.out, what), result)
    return result


def forget_part(out: Path, what: str) -> None:
    """The experiment is done: next time it is computed anew."""
    part_path(out, what).unlink(missing_ok=True)


def read_result(out: Path, what: str) -> Result | None:
    """The finished result of an experiment, or None."""
    return _read(result_path(out, what))


def _begin(
    what: str,
    options: Options,
    argv: Sequence[str],
    profiles: Profiles,
    seed: int | None,
    about: Mapping[str, Any],
) -> Result:
    """A new result without cells, or what a kill has left of the same."""
    part, settings = part_path(options.out, what), plain(settings_of(options))
    remove_parts(part)
    usual = plain(settings_of(type(options)(profile=options.profile, **profiles[options.profile])))
    wanted = plain(
        {
            "profile": options.profile,
            "changes": [n for n, v in usual.items() if settings[n] != v and not isinstance(getattr(options, n), Path)],
            "settings": settings,
            **about,
        }
    )
    now = environment(argv, seed)
    found = None if options.restart else _read(part)
    if found is None:
        return {"environment": now, **wanted, "cells": {}}
    odd = [name for name, value in wanted.items() if found.get(name) != value]
    if odd:
        raise UsageError(
            f"expected to go on with {part}, got another {' and '.join(odd)}; repeat its command, "
            f"{found['environment']['command']}, or begin again with --restart"
        )
    return resumed(found, now)


def _read(path: Path) -> Result | None:
    try:
        content: Result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"expected the JSON of a result in {path}, got {error}; remove it or use --restart") from error
    return content
