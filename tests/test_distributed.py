"""`Normalizer` with DistributedDataParallel and fully_shard, in two processes: the same weights as in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distributed_worker

MODES = [
    "ddp-hard",
    "ddp-soft-differentiable",
    "fsdp-hard",
    "fsdp-soft",
    "fsdp-cap-upper",
    "fsdp-hard-per_channel-joint",
    "fsdp-soft-differentiable",
]
DEFERRED = ["ddp-hard-deferred", "fsdp-hard-deferred"]


def run_in_two_processes(modes: list[str], folder: Path) -> None:
    here = Path(distributed_worker.__file__)
    paths = os.pathsep.join([str(here.parents[1] / "src"), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(here), ",".join(modes), str(folder)]
    processes = []
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        with (folder / f"log.{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [p.wait(timeout=300) for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join((folder / f"log.{rank}").read_text()[-3000:] for rank in range(2))


def ends(mode: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{mode}.{rank}", weights_only=True) for rank in range(2)]


def check(mode: str, folder: Path) -> None:
    one, two = ends(mode, folder)
    alone, _ = distributed_worker.result("single" + mode[mode.index("-") :].replace("-compile", ""), 0, 1)
    assert one.keys() == two.keys() == alone.keys()
    for key in alone:
        assert torch.equal(one[key], two[key]), key
        torch.testing.assert_close(one[key], alone[key], rtol=1e-6, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")
    if "joint" not in mode:
        assert float(alone["norms"].max()) <= 1.5 * 1.06  # upper bounds, on small images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distributed")
    run_in_two_processes(MODES + DEFERRED, path)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_end_with_the_weights_of_one(mode: str, folder: Path) -> None:
    check(mode, folder)


@pytest.mark.parametrize("mode", DEFERRED)
def test_ranks_that_hear_from_their_gpus_at_different_times_have_the_same_weights(mode: str, folder: Path) -> None:
    one, two = ends(mode, folder)
    for key in one:
        assert torch.equal(one[key], two[key]), key
    assert float(one["norms"].max()) <= 1.5 * 1.06


def test_sharded_weights_are_not_gathered_where_the_method_allows(folder: Path) -> None:
    """Only a convolution with one group, whose norm is not a maximum over rows; and with proofs, matrices."""
    for mode in ("fsdp-hard", "fsdp-soft", "fsdp-hard-per_channel-joint"):
        for rank in range(2):
            assert (folder / f"{mode}.{rank}.txt").read_text().startswith("[(16, 1, 3, 3)] "), mode
    assert "(7, 160)" in (folder / "fsdp-cap-upper.0.txt").read_text()


@pytest.mark.parametrize("mode", [m for m in MODES if m.startswith("fsdp")])
def test_a_nan_on_one_rank_is_refused_by_both(mode: str, folder: Path) -> None:
    for rank in range(2):
        said = (folder / f"{mode}.{rank}.txt").read_text()
        assert "got layers '1.pointwise' (zero, NaN or infinite, here or on another rank)" in said, (rank, said)


@pytest.mark.slow
def test_a_compiled_model_in_ddp(tmp_path: Path) -> None:
    run_in_two_processes(["ddp-hard-compile"], tmp_path)
    check("ddp-hard-compile", tmp_path)


def test_a_model_that_is_sharded_already_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from opnorm.normalize import Normalizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
        with pytest.raises(ValueError, match="'0' sharded; make the Normalizer before"):
            Normalizer(model, None, K=1.0)
    finally:
        dist.destroy_process_group()
