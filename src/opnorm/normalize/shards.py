"""What this rank holds of a weight that FSDP shards by rows, and the sums and maxima over the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a weight, along its dimension 0.

    Attributes:
        tensor: the rows, which this rank may write to.
        group: the ranks among which the rows are distributed; None where this rank has them all.
        first: the number of the first row here.
        total: the number of rows of the whole weight.
        chunk: the number of rows that a rank has, but for the last ones.
    """

    tensor: Tensor
    group: Any = None
    first: int = 0
    total: int = 0
    chunk: int = 0

    @classmethod
    def of(cls, weight: Any) -> Rows:
        """The rows of a plain tensor, which are all, or of a DTensor sharded along dimension 0."""
        if not hasattr(weight, "device_mesh"):
            return cls(weight.detach(), None, 0, weight.shape[0])
        mesh, placements = weight.device_mesh, weight.placements
        sharded = [i for i, p in enumerate(placements) if not p.is_replicate()]
        local = weight.detach().to_local()
        if not sharded:
            return cls(local, None, 0, weight.shape[0])
        if len(sharded) > 1 or not placements[sharded[0]].is_shard(0):
            raise ValueError(
                f"expected a weight that is whole or sharded along dimension 0, as by fully_shard, got placements "
                f"{placements}; normalise the model before it is distributed otherwise"
            )
        ranks, rank = mesh.size(sharded[0]), mesh.get_local_rank(sharded[0])
        each = -(-weight.shape[0] // ranks)  # as torch.chunk divides rows
        return cls(local, mesh.get_group(sharded[0]), min(rank * each, weight.shape[0]), weight.shape[0], each)

    def whole(self) -> Tensor:
        """The whole weight, gathered."""
        if self.group is None:
            return self.tensor
        full = self.tensor.new_zeros(self.total, *self.tensor.shape[1:])
        full[self.first : self.first + len(self.tensor)] = self.tensor
        dist.all_reduce(full, group=self.group)
        return full

    def part(self, full: Tensor) -> Tensor:
        """The rows of this rank in a tensor of all rows."""
        return full[self.first : self.first + len(self.tensor)]


def reduced(tensors: Sequence[Tensor], groups: Sequence[Any], op: Any = None) -> list[Tensor]:
    """Each tensor summed over the ranks of its group, by one all-reduce a group; those without one as they are."""
    result = list(tensors)
    for group in dict.fromkeys(g for g in groups if g is not None):
        chosen = [i for i, g in enumerate(groups) if g is group]
        flat = torch.cat([result[i].reshape(-1) for i in chosen])
        dist.all_reduce(flat, op or dist.ReduceOp.SUM, group=group)
        parts = flat.split([result[i].numel() for i in chosen])
        for i, part in zip(chosen, parts, strict=True):
            result[i] = part.view_as(result[i])
    return result
