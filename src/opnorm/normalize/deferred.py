"""What a GPU has found, read by the host once it is there, and never waited for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opnorm.normalize.units import Unit

UNSEEN = 2  # power iterations where the host cannot look: in a captured or compiled step, or before the first reply
MOST = 10


class Deferred:
    """The norms and residuals of a step, in pinned memory, with the event after which they are valid.

    How long a copy takes is not reproducible, and the number of iterations that follows from it neither. With
    `torch.use_deterministic_algorithms(True)` the number is constant. So it is among several processes, whose copies
    take different times: replicas would drift apart, and shards wait for a sum that the others leave out.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._units: Sequence[Unit] = ()
        self._residuals: dict[Unit, float] = {}

    def send(self, units: Sequence[Unit], values: Tensor) -> None:
        """Begin to copy (2, units): norms and residuals; dropped while an earlier copy is under way."""
        if _host_is_blind() or self._event is not None:
            return
        if self._host is None or self._host.shape != values.shape or self._host.dtype != values.dtype:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._units = units
        self._event = torch.cuda.Event() if values.is_cuda else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> dict[Unit, float]:
        """The norms of the last step whose copy has ended; nothing if there is none."""
        if _host_is_blind() or not self._units or (self._event is not None and not self._event.query()):
            return {}
        assert self._host is not None
        sigmas, residuals = self._host.tolist()
        units, self._event, self._units = self._units, None, ()
        self._residuals = dict(zip(units, residuals, strict=True))
        return dict(zip(units, sigmas, strict=True))

    def count(self, unit: Unit, eps: float) -> int:
        """How often to iterate: once where the residual was small enough, more often the larger it was."""
        residual = self._residuals.get(unit)
        if residual is None or _host_is_blind() or _must_be_constant():
            return UNSEEN
        return 1 if residual <= eps else 1 + min(MOST, math.ceil(2 * math.log2(residual / eps)))


def _must_be_constant() -> bool:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several or torch.are_deterministic_algorithms_enabled()


def _host_is_blind() -> bool:
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
