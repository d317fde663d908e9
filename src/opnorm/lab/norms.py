"""`opnorm norms`: the table of a model's layers and their norms."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from opnorm.bound import Guarantee, Method
from opnorm.geometry import ConvGeometry
from opnorm.lab.arguments import read_method, read_settings, read_shapes
from opnorm.lab.cli import UsageError, parse
from opnorm.lab.loading import build_model, load_checkpoint
from opnorm.lab.norms_table import show, sizes_text
from opnorm.lab.record import environment, json_text, write_json, write_text
from opnorm.layers import Operators, operators_of
from opnorm.norms import operator_norm
from opnorm.norms.baselines import Miyato2018, Runkel2021
from opnorm.operator import ConvOperator

PROGRAM = "opnorm norms"
Row = dict[str, Any]


@dataclass(frozen=True)
class Norms:
    """The operator norm of every convolution and linear layer of a model, each on the input size that it gets.

    For example:
      opnorm norms mobilenet_v2 --input 3,224,224
      opnorm norms my_package.my_module:build --input 3,any,any --checkpoint weights.safetensors --guarantee exact
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A built-in name, or package.module:factory, or file.py:factory; modules in the current directory are found."""

    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="SIZES")] = ()
    """Shape of an input without batch, as 3,224,224; `any` for a size that may be any. Repeated for several inputs.
    Without it no layer knows its input size, and norms hold for every size."""

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Weights: a .safetensors file, or a state dict saved by torch. Nothing else is unpickled."""

    arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An argument of the model's factory, such as num_classes=10. May be repeated."""

    method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto"
    """A method by name, such as exact, fourierbound or "PowerIteration(eps=0.001)"; auto picks one by layer."""

    guarantee: Annotated[Literal["exact", "upper", "lower"] | None, tyro.conf.arg(metavar="{exact,upper,lower}")] = None
    """What every value has to satisfy; an exact value satisfies all three."""

    compare: bool = False
    """Add what Runkel2021 (the published bound) and Miyato2018 (torch's spectral_norm, converged) say."""

    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "float64"] | None,
        tyro.conf.arg(metavar="{float16,bfloat16,float32,float64}"),
    ] = None
    """Convert the weights before computing; by default they stay as they are."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""

    seed: int = 0
    """For weights that a factory draws, and for starting vectors."""

    json: bool = False
    """Write JSON, with the environment, in place of the table."""

    csv: bool = False
    """Write CSV in place of the table."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write to this file too, .json or .csv by its name; with --json or --csv, to the file only."""


def main(argv: Sequence[str]) -> int:
    """Run `opnorm norms`."""
    config = parse(Norms, argv, PROGRAM)
    method, format_ = read_method(config.method), _format(config)
    operators = _operators(config)
    with torch.no_grad():
        rows = list(_progress(_rows(operators, method, config), len(operators)))
    report = {
        "environment": environment(["norms", *argv], config.seed),
        "model": config.model,
        "input": read_shapes(config.input),
        "layers": rows,
        "left_out": operators.left_out,
    }
    _write(report, config, format_)
    return _code(rows, method)


def _code(rows: list[Row], method: Method | str) -> int:
    """1 if nothing could be computed, or, when `auto` was to pick the methods, not everything."""
    missing = sum(row["norm"] is None for row in rows)
    return int(missing > 0 if method == "auto" else missing == len(rows))


def _format(config: Norms) -> str:
    """`"json"`, `"csv"` or `"table"`: checked before anything is computed, so that a wrong name costs nothing."""
    if config.json and config.csv:
        raise UsageError("expected --json or --csv, got both")
    if config.output is None:
        return "json" if config.json else "csv" if config.csv else "table"
    suffix = config.output.suffix.lstrip(".")
    format_ = "json" if config.json else "csv" if config.csv else suffix
    if format_ not in ("json", "csv"):
        raise UsageError(f"expected --output as a .json or .csv file, got {config.output}")
    if config.output.is_dir() or not config.output.parent.is_dir():
        raise UsageError(f"expected --output as a file in a folder that exists, got {config.output}")
    return format_


def _operators(config: Norms) -> Operators:
    shapes = read_shapes(config.input)
    model = build_model(config.model, read_settings(config.arg), config.seed)
    if config.checkpoint is not None:
        load_checkpoint(model, config.checkpoint)
    model.to(_device(config.device))
    try:
        operators = operators_of(model, shapes or None)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not operators:
        left_out = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in operators.left_out.items())
        raise UsageError(
            f"expected a model that calls a convolution or linear layer, got none in {config.model}. {left_out}"
        )
    return operators


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"expected --device as cpu, or cuda where torch sees a GPU, got {name!r}") from error
    return device


def _rows(operators: Operators, method: Method | str, config: Norms) -> Iterator[Row]:
    dtype = getattr(torch, config.dtype) if config.dtype else None
    for name, operator in operators.items():
        cast = operator if dtype is None else operator.to(dtype)
        yield {"name": name, **_described(operator.geometry), **_computed(cast, method, config)}


def _described(geometry: ConvGeometry) -> Row:
    fields = {name: getattr(geometry, name) for name in geometry.__dataclass_fields__}
    return {"kind": geometry.kind, **fields, "output_size": geometry.output_size}


def _computed(operator: ConvOperator, method: Method | str, config: Norms) -> Row:
    row = _norm(operator, method, config.guarantee)
    if config.compare:
        others = Runkel2021(seed=config.seed), Miyato2018(n_power_iterations=100, seed=config.seed)
        row["compare"] = {type(other).__name__: _norm(operator, other, None) for other in others}
    return row


def _norm(operator: ConvOperator, method: Method | str, guarantee: Guarantee | None) -> Row:
    """The norm, or the reason why there is none, which must not take the other layers with it."""
    try:
        bound = operator_norm(operator, method, guarantee=guarantee)
    except ValueError as error:
        return {"norm": None, "guarantee": None, "method": str(method), "reason": str(error)}
    return {"norm": float(bound), "guarantee": bound.guarantee, "method": str(bound.method)}


def _progress(rows: Iterator[Row], total: int, patience: float = 2.0) -> Iterator[Row]:
    """The rows, with a bar on a terminal's stderr once they have taken `patience` seconds."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, later = bar.add_task("norms", total=total), threading.Timer(patience, bar.start)
    if bar.console.is_terminal:
        later.start()
    try:
        for row in rows:
            bar.advance(task)
            yield row
    finally:
        later.cancel()
        if later.ident is not None:
            later.join()  # so that it cannot start the bar after the end
        if bar.live.is_started:
            bar.stop()


def _write(report: Row, config: Norms, format_: str) -> None:
    if config.output is not None:
        try:
            write_json(config.output, report) if format_ == "json" else write_text(config.output, _csv(report))
        except OSError as error:
            raise UsageError(f"{config.output} cannot be written: {error}") from error
    elif format_ == "json":
        print(json_text(report), end="")
    elif format_ == "csv":
        print(_csv(report), end="")
    if not config.json and not config.csv:
        checkpoint = config.checkpoint
        show(report, f"weights of {checkpoint}" if checkpoint else f"weights as built, seed {config.seed}")
        if config.output is not None:
            print(f"written to {config.output}")


def _csv(report: Row) -> str:
    text = io.StringIO()
    rows = [_flat(row) for row in report["layers"]]
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Row) -> Row:
    """A row of simple values: sizes as 3x3, (before, after) as 1:1, and a comparison by the names of its methods."""
    flat = {key: _flat_value(value) for key, value in row.items() if key != "compare"}
    return flat | {name: other["norm"] for name, other in row.get("compare", {}).items()}


def _flat_value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return sizes_text([":".join(map(str, n)) if isinstance(n, tuple) else n for n in value], "x")
