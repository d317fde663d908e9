"""`opnorm bench memory`: peak memory of a norm, in a process of its own, and its time beside the N + 2p grid."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from opnorm import ConvGeometry, ConvOperator, FourierBound, Method, models, operators_of
from opnorm.lab.bench.timing import interleaved
from opnorm.lab.cli import console_width, parse
from opnorm.lab.record import environment, write_json
from opnorm.norms.baselines import Runkel2021


def mobilenet() -> list[ConvOperator]:
    """The 17 depthwise layers of MobileNetV2 at 224×224."""
    found = operators_of(models.build("mobilenet_v2"), (3, 224, 224))
    return [op.detach() for op in found.values() if op.geometry.kind == "depthwise"]


def volume() -> list[ConvOperator]:
    """64 channels, 3×3×3, on 128×128×128 voxels."""
    geometry = ConvGeometry(64, 64, (3, 3, 3), (128, 128, 128), padding=1, groups=64)
    return [ConvOperator(geometry, torch.randn(geometry.weight_shape))]


CASES: dict[str, Callable[[], list[ConvOperator]]] = {
    "MobileNetV2, 17 depthwise layers": mobilenet,
    "3-D 64×128³": volume,
}
METHODS: dict[str, Method] = {"Runkel2021": Runkel2021(), "FourierBound": FourierBound()}


@dataclass(frozen=True)
class Memory:
    """Peak memory and time of Runkel2021 and FourierBound, on MobileNetV2's layers and on a large 3-D layer.

    All published methods and other packages, on smaller layers: opnorm bench peers.

    For example:
      opnorm bench memory --json results/norms_memory.json
    """

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the results."""

    rounds: int = 5
    """How often each method is timed."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    config = parse(Memory, argv, "opnorm bench memory")
    cells = [(case, method) for case in CASES for method in METHODS]
    peaks = {cell: _peak_in_process(*cell) for cell in track(cells, description="peak memory", transient=True)}
    results: dict[str, Any] = {"environment": environment(["bench", "memory", *argv], 0), "cases": {}}
    for case in CASES:
        torch.manual_seed(0)
        layers = CASES[case]()
        times = interleaved({name: _run(method, layers) for name, method in METHODS.items()}, config.rounds, case)
        results["cases"][case] = {name: {"peak_bytes": peaks[case, name]} | times[name] for name in METHODS}
    _show(results)
    if config.json:
        write_json(config.json, results)
    return 0


def _run(method: Method, layers: list[ConvOperator]) -> Callable[[], object]:
    if isinstance(method, FourierBound):
        return lambda: method.compute_all(layers)
    return lambda: [method.compute(layer) for layer in layers]


def _peak_in_process(case: str, method: str) -> int:
    code = "import sys; from opnorm.lab.bench.memory import report; report(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, case, method], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout))


def report(case: str, method: str) -> None:
    """Print by how much the peak resident memory of this process grows over one computation, after a small one."""
    torch.manual_seed(0)
    layers = CASES[case]()
    warm = ConvGeometry(4, 4, (3,) * layers[0].geometry.dim, (5,) * layers[0].geometry.dim, padding=1, groups=4)
    METHODS[method].compute(ConvOperator(warm, torch.randn(warm.weight_shape)))
    print(growth(_run(METHODS[method], layers)))


def growth(run: Callable[[], object]) -> int:
    """By how many bytes the resident memory of this process rises, at its peak, above where it stands before run().

    The peak that `getrusage` gives is of the whole life of the process, and a child inherits its parent's: what fits
    below that is not seen. Linux lets a process set it back; elsewhere that is the figure all the same.
    """
    gc.collect()
    if sys.platform != "linux":
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        return unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc has no such function
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would serve run() unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("VmRSS")
    run()
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def _show(results: dict[str, Any]) -> None:
    table = Table("case", "method", "peak MiB", "ms", "ratio")
    for case, methods in results["cases"].items():
        for name, cell in methods.items():
            ms, ratio = 1e3 * cell["seconds"]["median"], cell["ratio"]["median"]
            table.add_row(case, name, f"{cell['peak_bytes'] / 2**20:.1f}", f"{ms:.1f}", f"{ratio:.3f}")
    Console(width=console_width()).print(table)
