"""`opnorm bench peers`: this library beside published methods and other packages: tightness, time, peak memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from opnorm import ConvOperator, Exact, NormBound
from opnorm.lab.bench.contenders import CONTENDERS, REFERENCE, Contender, Refused, is_below, versions
from opnorm.lab.bench.layers import CELLS, operators, small
from opnorm.lab.bench.memory import growth
from opnorm.lab.bench.timing import interleaved
from opnorm.lab.cli import UsageError, console_width, parse
from opnorm.lab.record import environment, plain, write_json

SLOW = 1.0  # seconds; what takes longer is timed once


@dataclass(frozen=True)
class Peers:
    """Every method and package on 17 layers: value over norm, time, peak memory. One file a layer, where it is missing.

    For example:
      opnorm bench peers --weights mobilenetv2.safetensors --out results/peers
      opnorm bench peers --out results/peers --page docs/comparison.md
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Where the results are. A layer whose file is there, with the same settings and packages, is not measured."""

    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """MobileNetV2 with batch norm folded, .safetensors. Without it its layers have Gaussian weights, as the others."""

    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Measure nothing: write tables and figures of the results into this page, between its two marks."""

    only: tuple[str, ...] = ()
    """Some of the layers: those whose names begin with one of these."""

    rounds: int = 15
    """How often each method is timed, if a call takes less than a second."""

    seed: int = 0
    """For random weights."""


def main(argv: Sequence[str]) -> int:
    """Measure what is missing, or write what has been measured into the page."""
    config = parse(Peers, argv, "opnorm bench peers")
    if config.page:
        from opnorm.lab.bench.peers_page import write_page

        write_page(config.page, config.out)
        return 0
    chosen = [cell for cell in CELLS if not config.only or cell.startswith(config.only)]
    if config.rounds < 2 or not chosen:
        raise UsageError(
            f"expected at least 2 rounds and --only as beginnings of {', '.join(CELLS)}, got {config.rounds} and "
            f"{' '.join(config.only)}"
        )
    layers = operators(config.weights, config.seed)
    settings: dict[str, Any] = {"rounds": config.rounds, "seed": config.seed, "packages": versions()}
    settings |= {"weights": config.weights and config.weights.name}
    console = Console(width=console_width())
    for cell in chosen:
        file = config.out / f"{cell}.json"
        if not _is_done(file, settings):
            header = {"environment": environment(["bench", "peers", *argv], config.seed), "settings": settings}
            write_json(file, header | {"kind": CELLS[cell][0]} | measure(layers[cell], config.rounds, cell))
        console.print(_table(cell, json.loads(file.read_text())))
    return 0


def _is_done(file: Path, settings: dict[str, Any]) -> bool:
    return file.is_file() and json.loads(file.read_text())["settings"] == plain(settings)


@torch.no_grad()
def measure(operator: ConvOperator, rounds: int, what: str = "") -> dict[str, Any]:
    """The norm of a layer, and of every contender: value over norm, seconds, peak memory; or why there is none."""
    geometry, exact = operator.geometry, _exact(operator)
    rows: dict[str, dict[str, Any]] = {}
    fast: dict[str, Callable[[], Any]] = {}
    for name, contender in CONTENDERS.items():
        rows[name], call = _first(contender, operator, exact)
        if call and (name == REFERENCE or rows[name]["seconds"]["median"] < SLOW):
            fast[name] = call
    for name, times in interleaved(fast, rounds, what).items():
        rows[name] |= {"seconds": times["seconds"], "of_auto": times["ratio"], "rounds": rounds}
    for name, peak in _peaks(operator, [name for name, row in rows.items() if "ratio" in row]).items():
        rows[name]["peak_bytes"] = peak
    return {"layer": str(geometry), "stride": geometry.stride[0], "norm": exact, "methods": rows}


def _exact(operator: ConvOperator) -> float:
    return float(Exact().compute(operator.to(torch.float64)).value)


def _first(
    contender: Contender, operator: ConvOperator, exact: float
) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """The value of a contender and the time of a call; whatever a package raises is a result too."""
    row: dict[str, Any] = {"family": contender.family}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = contender.prepare(operator)
            for _ in range(trial.calls):
                start = time.perf_counter()
                result = trial.call()
                seconds = time.perf_counter() - start
            row |= {"guarantee": result.guarantee} if isinstance(result, NormBound) else {}
            row |= {"ratio": _ratio(result, operator, exact)}
    except Refused as reason:
        return row | {"refused": str(reason)}, None
    except ModuleNotFoundError as error:
        return row | {"not_installed": f'{error.name}; pip install "opnorm[bench]"'}, None
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}, None
    return row | {"seconds": {"median": seconds}, "rounds": 1}, trial.call


def _ratio(result: NormBound | Tensor | float, operator: ConvOperator, exact: float) -> float:
    """Value over norm; of a weight that has been normalised to 1: one over the norm of the layer that has it."""
    if not isinstance(result, Tensor) or result.dim() == 0:
        return float(result) / exact
    divisor = operator.weight.norm() / result.norm()
    if torch.allclose(divisor * result, operator.weight, rtol=1e-5, atol=1e-7 * float(operator.weight.abs().amax())):
        return float(divisor) / exact
    return 1 / _exact(ConvOperator(operator.geometry, result.detach()))


def _peaks(operator: ConvOperator, names: list[str]) -> dict[str, int]:
    """Peak memory of one call each, in a process that does nothing else."""
    code = "from opnorm.lab.bench.peers import report; report()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((operator, names)), stdout=subprocess.PIPE, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def report() -> None:
    """Print by how many bytes each contender raises the memory of this process, after a first call on a small layer."""
    operator, names = pickle.load(sys.stdin.buffer)
    warnings.simplefilter("ignore")
    peaks = {}
    for name in names:
        with contextlib.suppress(Exception):
            CONTENDERS[name].prepare(small(operator.geometry)).call()
        _forget_tables()
        peaks[name] = growth(CONTENDERS[name].prepare(operator).call)
    print(json.dumps(peaks))


def _forget_tables() -> None:
    """Empty the caches of this library, so that each of its methods pays for the tables that it needs."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and str(found.__module__).startswith("opnorm"):
            found.cache_clear()


def _table(cell: str, results: dict[str, Any]) -> Table:
    columns = ("method", "guarantee", "value / norm", "ms", "of auto", "peak MiB")
    table = Table(*columns, title=f"{results['kind']}: {cell}, norm {results['norm']:.4f}")
    for name, row in results["methods"].items():
        if "ratio" not in row:
            key = next(key for key in ("refused", "error", "not_installed") if key in row)
            table.add_row(name, key.replace("_", " "), row[key][:40])
            continue
        ratio = float(row["ratio"])  # a number, or "inf"
        figures = f"{ratio:.4g}" if ratio > 100 else f"{ratio:.4f}", f"{1e3 * row['seconds']['median']:.2f}"
        of_auto = f"{row['of_auto']['median']:.2f}" if "of_auto" in row else ""
        style = "red" if is_below(ratio) else "bold" if row["family"] == "ours" else ""
        memory = f"{row['peak_bytes'] / 2**20:.1f}"
        table.add_row(name, row.get("guarantee", ""), *figures, of_auto, memory, style=style)
    return table
