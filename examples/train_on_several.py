"""Bounded layers on several devices: the same weights in every process, with DDP or, sharded, with FSDP2.

torchrun --nproc-per-node 2 examples/train_on_several.py            (on CPUs where there is no GPU)
torchrun --nproc-per-node 2 examples/train_on_several.py --fsdp
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import opnorm
from opnorm.models import ds_convnet


def main(fsdp: bool = False, steps: int = 20) -> float:
    """The largest norm of a layer, of 2 that are allowed; the same in every process."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)  # the same weights to begin with
    model = ds_convnet().to(device)

    norm = opnorm.Normalizer(model, input_shape=(1, 8, 8), K=2.0, guarantee="upper")  # first
    if fsdp:  # then DDP, or fully_shard
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        run = fully_shard(model)
    else:
        run = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # then the optimizer
    norm.attach(optimizer)

    torch.manual_seed(dist.get_rank())  # images of its own for each process
    for _ in range(steps):
        x, y = torch.randn(32, 1, 8, 8, device=device), torch.randint(10, (32,), device=device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(x), y).backward()
        optimizer.step()

    norms = norm.norms()  # in every process, since those of sharded weights ask each other
    if dist.get_rank() == 0:
        for name, bound in norms.items():
            print(f"{name:<14} {float(bound):.6f} {bound.guarantee}")
    dist.destroy_process_group()
    return max(float(bound) for bound in norms.values())


if __name__ == "__main__":
    main("--fsdp" in sys.argv)
