"""`opnorm train` in processes of its own, forked from one that has imported everything: killed as any process is."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

# What a run imports, also where it does so late.
PRELOAD = [
    "train_worker", "opnorm.lab.train", "sklearn.datasets", "torch._dynamo", "torch.export._trace", "networkx",
    "matplotlib.backends.backend_agg",
]  # fmt: skip
LIMIT = 600.0  # seconds for anything that is waited for
PORTS: list[socket.socket] = []  # that runs were given, bound for as long as this process lives


def started(folder: Path, *argv: str, held_at: int | None = None, **variables: str) -> ForkServerProcess:
    """`opnorm train` in this folder, on one thread; what it prints is added to a file there.

    With `held_at` it waits for a signal after that step, so that it is not over before the test sends one, however
    busy the machine is.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_train, args=(argv, folder, held_at, variables))
    process.start()
    return process


def in_processes(
    ranks: int, folder: Path, *argv: str, held_at: Mapping[int, int] | None = None
) -> list[ForkServerProcess]:
    """The processes of one run, as `opnorm train --devices` or torchrun starts them; {rank: step} of those to hold."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    if sys.platform == "linux":
        common["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks for the machine's name, and warns where that has no address
    argv = (*argv, "--devices", str(ranks))
    held = held_at or {}
    return [started(folder, *argv, held_at=held.get(r), **common, LOCAL_RANK=str(r)) for r in range(ranks)]


def finished(processes: list[ForkServerProcess]) -> list[int | None]:
    """Their exit codes, once all have ended; they are killed where that takes too long."""
    deadline = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(deadline - time.monotonic())
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def log_of(process: ForkServerProcess, folder: Path) -> str:
    """What it has printed."""
    path = folder / f"{process.pid}.out"
    return path.read_text() if path.exists() else ""


def _port() -> int:
    """A port that the system gives to no other process before the run listens on it, since this one keeps it bound."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the run, which sets it too, bind it as well
    held.bind(("127.0.0.1", 0))
    PORTS.append(held)
    return int(held.getsockname()[1])


def _train(argv: tuple[str, ...], folder: Path, held_at: int | None, variables: dict[str, str]) -> None:
    out = os.open(folder / f"{os.getpid()}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ |= {"COLUMNS": "200"} | variables

    import torch

    from opnorm.lab.cli import main

    torch.set_num_threads(1)
    if held_at is not None:
        _hold(held_at)
    sys.exit(main(["train", *argv]))


def _hold(step: int) -> None:
    """Have the run wait after this step, before it is saved, until a signal has come."""
    from opnorm.lab.train_loop import Trainer

    pause = Trainer._pause

    def held(self: Trainer) -> None:
        while self.progress.step >= step and self.signals.received is None:
            time.sleep(0.005)
        pause(self)

    Trainer._pause = held  # type: ignore[method-assign]
