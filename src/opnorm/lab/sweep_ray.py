"""`cluster` and `submit`: `opnorm train` as a task of Ray, on this machine alone or on a cluster."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import shlex
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opnorm.lab import cli
from opnorm.lab.cli import UsageError

STORE = 80 * 2**20  # bytes, the least that Ray takes: no data goes through it
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # what its own processes have to say
# Without it Ray takes the machine's address for its own where it was told 127.0.0.1, and listens on all interfaces.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True)
class Share:
    """What one run gets of a machine."""

    cpus: int = 1
    gpus: float = 0.0


@contextlib.contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Ray, begun here for this machine and ended with all its processes, or that of the cluster at `address`."""
    os.environ.update(QUIET if address else QUIET | LOOPBACK)
    import ray  # which reads these when it is imported

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    with tempfile.TemporaryDirectory(prefix="opnorm-ray-", dir=_short(), ignore_cleanup_errors=True) as folder:
        try:
            if address:
                ray.init(address, **quiet)
            else:
                ray.init(
                    "local", include_dashboard=False, object_store_memory=STORE, _node_ip_address="127.0.0.1",
                    _temp_dir=folder, **quiet,
                )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address is None:
                raise
            reason = str(error).partition("\n")[0]
            raise UsageError(f"expected --address of a Ray cluster that runs, got {address}: {reason}") from error
        try:
            yield
        finally:
            ray.shutdown()


def submit(argv: Sequence[str], log: Path, share: Share) -> Any:
    """Have `opnorm train` run on some machine of the cluster; what stands for its exit code."""
    return _task(share).remote([*argv], str(log), os.getcwd(), share.cpus)


@functools.cache  # Ray keeps to the order of those that are the same task
def _task(share: Share) -> Any:
    """A process for each run, as if it were typed: nothing is left of the one before, nor is a crash its end too."""
    import ray

    return ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0, max_calls=1)(_train)


def require_room(share: Share) -> None:
    """Refuse a share that no machine of the cluster has: its runs would wait for ever."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for option, kind, wanted in (("cpus", "CPU", share.cpus), ("gpus", "GPU", share.gpus)):
        largest = max((machine.get(kind, 0) for machine in machines), default=0)
        if wanted > largest:
            raise UsageError(f"expected --{option}-per-run of at most {largest:g}, the largest machine, got {wanted:g}")


def _train(argv: list[str], log: str, folder: str, threads: int) -> int:
    """In a process of Ray: `opnorm train`, all that it prints into a file; its exit code."""
    os.chdir(folder)
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        faulthandler.enable(file)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            print(f"$ {shlex.join(['opnorm', 'train', *argv])}")
            torch.set_num_threads(threads)
            try:
                return cli.main(["train", *argv])
            except Exception as error:
                traceback.print_exc()
                print(f"{type(error).__name__}: {' '.join(str(error).split())}")  # in one line, and the last one
                return 1


def _short() -> str | None:
    """A folder for Ray's sockets, whose names may have only about a hundred letters."""
    return "/tmp" if os.path.isdir("/tmp") else None
