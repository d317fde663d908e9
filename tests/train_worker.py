"""`opnorm train` in processes of its own, forked from one that has imported everything: killed as any process is."""

from __future__ import annotations

import os
import socket
import sys
import time
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

# What a run imports, also where it does so late.
PRELOAD = [
    "train_worker", "opnorm.lab.train", "sklearn.datasets", "torch._dynamo", "torch.export._trace", "networkx",
    "matplotlib.backends.backend_agg",
]  # fmt: skip
LIMIT = 240.0  # seconds for anything that is waited for


def started(folder: Path, *argv: str, **variables: str) -> ForkServerProcess:
    """`opnorm train` in this folder, on one thread; what it prints is added to a file there."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_train, args=(argv, folder, variables))
    process.start()
    return process


def in_processes(ranks: int, folder: Path, *argv: str) -> list[ForkServerProcess]:
    """The processes of one run, as `opnorm train --devices` or torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = (*argv, "--devices", str(ranks))
    return [started(folder, *argv, **common, LOCAL_RANK=str(r)) for r in range(ranks)]


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


def _train(argv: tuple[str, ...], folder: Path, variables: dict[str, str]) -> None:
    out = os.open(folder / f"{os.getpid()}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ |= {"COLUMNS": "200"} | variables

    import torch

    from opnorm.lab.cli import main

    torch.set_num_threads(1)
    sys.exit(main(["train", *argv]))
