"""A run on several devices: a process each, which takes its share of every batch, and what they agree on."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from opnorm.lab.cli import UsageError
from opnorm.lab.data import Share
from opnorm.lab.train_config import Train

PRECISIONS: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def fabric_for(config: Train) -> Fabric:
    """Where and in which precision to compute, and in how many processes."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it says what it is about to do
    devices, machines = _processes(config)
    _require(config, devices, devices * machines)
    strategy = _strategy(config.strategy, devices * machines)
    try:
        return Fabric(
            accelerator=config.device, devices=devices, num_nodes=machines, strategy=strategy,
            precision=PRECISIONS[config.precision],
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"expected --precision that {config.device} has, got {config.precision}: {error}") from error


@contextmanager
def launched(fabric: Fabric, argv: Sequence[str]) -> Iterator[None]:
    """Start the other processes, unless torchrun has, and end those that are left where this one fails."""
    if fabric.world_size == 1:
        yield
        return
    if "LOCAL_RANK" not in os.environ and sys.argv[1:] != ["train", *argv]:
        raise UsageError(
            "expected --devices above 1 on a command line, got it inside another program, which cannot be started again"
            " for each device; run `opnorm train` as a process of its own"
        )
    fabric.launch()
    try:
        yield
    except BaseException:
        for process in getattr(fabric.strategy.launcher, "procs", ()):
            process.kill()  # one that waits for this one would wait for long
        raise


def _processes(config: Train) -> tuple[int, int]:
    """How many on this machine, and on how many machines: as torchrun says, where it has started them."""
    if not dist.is_torchelastic_launched():
        return config.devices, 1
    here, everywhere = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    return here, everywhere // here


def _require(config: Train, devices: int, processes: int) -> None:
    """Refuse devices that are not there, and what cannot be shared out."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not {"cuda": cuda, "mps": mps}.get(config.device, True):
        raise UsageError(f"expected --device that torch sees here, got {config.device}; use auto or cpu")
    device = config.device if config.device != "auto" else "cuda" if cuda else "mps" if mps else "cpu"
    most = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device, devices)
    if devices > most:
        raise UsageError(f"expected --devices of at most {most} with {device}, got {devices}; or add --device cpu")
    if processes > config.batch_size:
        raise UsageError(f"expected --batch-size of at least the {processes} processes, got {config.batch_size}")
    if processes > 1 and config.strategy == "fsdp" and config.precision == "16":
        raise UsageError("expected --precision 32 or bf16 with --strategy fsdp, got 16")


def _strategy(name: str, processes: int) -> Strategy | str:
    """Fabric's own FSDP keeps flat slices of several weights together; the Normalizer needs rows of each of them."""
    if processes == 1:
        return "auto"
    if name == "ddp":
        return DDPStrategy()
    return ModelParallelStrategy(shard, data_parallel_size=processes, tensor_parallel_size=1)


class Team:
    """The processes of a run, which do the same steps at the same time; one alone asks nobody.

    Attributes:
        share: which part of every batch this process takes.
    """

    def __init__(self, fabric: Fabric):
        self.share = Share(fabric.global_rank, fabric.world_size)
        on_cpu = fabric.device.type == "cpu"  # else a group of its own, since a question must not wait for a GPU
        self._group = None if on_cpu or self.share.ranks == 1 else dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.share.rank == 0

    def largest(self, *values: int) -> list[int]:
        """The largest that any process has of each value."""
        if self.share.ranks == 1:
            return [*values]
        found = torch.tensor(values)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in found]

    def total(self, sums: Tensor) -> Tensor:
        """The same tensor, added up over all processes."""
        if self.share.ranks > 1:
            dist.all_reduce(sums)
        return sums

    def everyones(self, item: Any) -> list[Any]:
        """What each process has, by rank."""
        found = [item] * self.share.ranks
        if self.share.ranks > 1:
            dist.all_gather_object(found, item, group=self._group)
        return found


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Keep rows of each weight on each device, those of a block gathered while it computes."""
    for block in _blocks(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the model, and of the containers among them; none where blocks have a weight in common."""
    blocks = [block for child in model.children() for block in _opened(child)]
    blocks = [block for block in blocks if any(True for _ in block.parameters())]
    held = Counter(id(p) for block in blocks for p in {id(p): p for p in block.parameters()}.values())
    return blocks if all(count == 1 for count in held.values()) else []


def _opened(module: nn.Module) -> list[nn.Module]:
    if type(module) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return [module]
    return [block for child in module.children() for block in _opened(child)]


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """While this is entered, by all processes, each has all weights of the model."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def finite(model: nn.Module) -> bool:
    """Whether all that this process holds of the weights is."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return all(bool(p.isfinite().all()) for p in local)


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state dicts of both, with whole tensors, as one process would have them; all processes take part."""
    return {
        "model": {name: _whole(value) for name, value in model.state_dict().items()},
        "optimizer": _changed(optimizer.state_dict(), lambda _, value: _whole(value)),
    }


def load_states(model: nn.Module, optimizer: Optimizer, content: Mapping[str, Any]) -> None:
    """Load what `states` has returned, in any number of processes."""
    own = model.state_dict()
    model.load_state_dict({name: _like(own.get(name), value) for name, value in content["model"].items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(_changed(content["optimizer"], lambda i, value: _like(parameters[i], value)))


def _changed(state: dict[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    """The state dict of an optimizer with another value for each that belongs to parameter i."""
    return state | {"state": {i: {k: change(i, v) for k, v in s.items()} for i, s in state["state"].items()}}


def _whole(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _like(own: Any, value: Any) -> Any:
    """The value, distributed as `own` is, where it has its shape; what only counts steps has not."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
