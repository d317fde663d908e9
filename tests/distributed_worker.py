"""What each process of `test_distributed` runs: python distributed_worker.py MODES FOLDER, RANK and WORLD_SIZE set."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opnorm.models import ds_convnet
from opnorm.normalize import Normalizer
from opnorm.normalize.deferred import Deferred
from opnorm.normalize.shards import Rows

BATCH, STEPS = 8, 6
SHAPE = (1, 8, 8)


def build(scaling: str, **options: object) -> tuple[nn.Module, Normalizer]:
    torch.manual_seed(2)
    model = ds_convnet(num_classes=7, width=5).double()  # 7, 5 and 10 rows do not divide by two ranks evenly
    model.insert(0, nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64))
    model.append(nn.Linear(7, 3, dtype=torch.float64))
    return model, Normalizer(model, SHAPE, K=1.5, scaling=scaling, **options)  # type: ignore[arg-type]


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (BATCH,), generator=generator)


def train(model: nn.Module, run: nn.Module, norm: Normalizer, rank: int, ranks: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norm.attach(optimizer)
    for step in range(STEPS):
        x, y = data(step)
        share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(x[share]), y[share]).backward()
        optimizer.step()
    return {k: whole(v) for k, v in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@contextmanager
def as_on_a_gpu(rank: int) -> Iterator[None]:
    """The step that never waits for its device, whose answers reach the first rank at once, and the other never."""
    with ExitStack() as stack:
        for module in ("engine", "batched", "measure"):
            stack.enter_context(patch(f"opnorm.normalize.{module}.host_may_look", lambda tensor: False))
        if rank:
            stack.enter_context(patch.object(Deferred, "arrived", lambda self: {}))
        yield


@contextmanager
def gathered(found: set[tuple[int, ...]]) -> Iterator[None]:
    """Collect the shapes of the weights that are gathered."""
    whole = Rows.whole

    def noting(self: Rows) -> Tensor:
        if self.group is not None:
            found.add((self.total, *self.tensor.shape[1:]))
        return whole(self)

    with patch.object(Rows, "whole", noting):
        yield


def refusal(norm: Normalizer, weight: Tensor, rank: int) -> str:
    """What a step says after the last row of a weight, which the last rank has, has become NaN there."""
    local = Rows.of(weight).tensor
    if rank and len(local):
        local[-1] = math.nan
    try:
        norm.step()
    except ValueError as error:
        return str(error)
    return "nothing"


def result(mode: str, rank: int, ranks: int) -> tuple[dict[str, Tensor], str]:
    """The weights after a few steps, and how a NaN is refused; MODE is kind-scaling, and more."""
    kind, scaling, *more = mode.split("-")
    options: dict[str, object] = {name: True for name in more if name in ("joint", "per_channel")}
    options |= {"guarantee": "upper"} if "upper" in more else {}
    options |= {"update": "differentiable"} if "differentiable" in more else {}
    model, norm = build(scaling, **options)
    run = model
    if kind == "ddp":
        run = nn.parallel.DistributedDataParallel(model)
        run = torch.compile(run) if "compile" in more else run
    elif kind == "fsdp":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    seen: set[tuple[int, ...]] = set()
    with as_on_a_gpu(rank) if "deferred" in more else gathered(seen):
        state = train(model, run, norm, rank, ranks)
    values = [b.value for b in norm.norms().values()]
    state["norms"] = torch.stack(values).double()
    said = refusal(norm, norm._units[2].weight, rank) if kind == "fsdp" else ""
    return state, f"{sorted(seen)} {said}"


def main() -> None:
    modes, folder = sys.argv[1].split(","), Path(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    if any(mode.startswith("fsdp") for mode in modes):
        from torch.distributed.device_mesh import init_device_mesh

        init_device_mesh("cpu", (ranks,))
    for mode in modes:
        state, said = result(mode, rank, ranks)
        torch.save(state, folder / f"{mode}.{rank}")
        (folder / f"{mode}.{rank}.txt").write_text(said)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts a process that is done


if __name__ == "__main__":
    main()
