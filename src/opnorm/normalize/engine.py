"""One `step()` for all layers: measure, look for trouble, and only then write."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opnorm.normalize.batched import Results, measure_all, relative
from opnorm.normalize.deferred import Deferred
from opnorm.normalize.measure import Iterated, host_may_look
from opnorm.normalize.shards import Rows
from opnorm.normalize.units import Unit

Part = tuple[torch.device, bool]  # a device, and whether the weights are in double precision
START_EPS = 1e-3  # the power iterations' residual before the first step, which finds nothing to start from


@dataclass(frozen=True, eq=False)
class _Found:
    """What a part was measured to be; `deferred`: where its values go that the host has not seen."""

    device: torch.device
    units: list[Unit]
    rows: dict[Unit, Rows]
    results: Results
    sigma: Tensor
    deferred: Deferred | None


class Engine:
    """Divides base weights by their norms, those of one device and precision at a time.

    On a CPU a power iteration goes on until its residual is small enough, and a weight without a norm is reported
    before anything is written. On a GPU the host never waits: how often to iterate follows from the residual of an
    earlier step, which has been copied to the host meanwhile, and a weight without a norm stops every write of the
    step on the device, and is reported by a later step.
    """

    def __init__(self, units: Sequence[Unit], batched: bool):
        self.units, self.batched = tuple(units), batched
        self._deferred: dict[Part, Deferred] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_deferred": {}}  # CUDA events cannot be copied

    def start(self) -> None:
        """The first normalisation, of frozen weights too; power iterations start from random vectors."""
        self._normalise(self.units, START_EPS)

    def step(self) -> None:
        """Normalise what an optimizer may have changed."""
        due = {unit for unit in self.units if unit.due}
        due |= {unit.before for unit in due if unit.before is not None}
        self._normalise([unit for unit in self.units if unit in due], None)

    def check(self) -> None:
        """Raise for a weight without a norm that a step on a GPU has met; waits for the device."""
        bad = [u for u in self.units if not math.isfinite(float(u.scale.last[0].detach()))]
        if bad:
            raise _no_norm(bad)

    def _parts(self, units: Sequence[Unit]) -> dict[Part, list[Unit]]:
        parts: dict[Part, list[Unit]] = defaultdict(list)
        for unit in units:
            parts[unit.weight.device, unit.weight.dtype == torch.float64].append(unit)
        return dict(parts)

    @torch.no_grad()
    def _normalise(self, units: Sequence[Unit], eps: float | None) -> None:
        """Measure every part, and only then write: a weight without a norm in one of them stops them all."""
        found = [self._find(part, some, eps) for part, some in self._parts(units).items()]
        for one in found:
            sigmas = [f.sigma.isfinite().all() for f in found if f.deferred and f.device == one.device]
            good = torch.stack(sigmas).all() if one.deferred else None
            with torch.autocast(one.device.type, enabled=False):
                written = _write(one.units, one.rows, one.results, one.sigma, good)
            if one.deferred:
                one.deferred.send(one.units, written)

    def _find(self, part: Part, units: list[Unit], eps: float | None) -> _Found:
        device, counts, deferred = part[0], None, None
        if eps is None and self.batched and not host_may_look(units[0].weight):
            deferred = self._deferred.setdefault(part, Deferred())
            _refuse(deferred.arrived().items())
            methods = {unit: unit.measure.method for unit in units if isinstance(unit.measure, Iterated)}
            counts = {unit: deferred.count(unit, method.eps) for unit, method in methods.items()}
        rows = {unit: Rows.of(unit.weight) for unit in units}
        with torch.autocast(device.type, enabled=False):
            results = self._measure(units, rows, counts, eps)
            sigma = _norms(units, results)
        if deferred is None:
            _refuse(zip(units, sigma.tolist(), strict=True))
        return _Found(device, units, rows, results, sigma, deferred)

    def _measure(
        self, units: list[Unit], rows: dict[Unit, Rows], counts: dict[Unit, int] | None, eps: float | None
    ) -> Results:
        if self.batched:
            return measure_all(units, rows, counts, eps)
        results: Results = {}
        for unit in units:
            columns = None if unit.before is None else relative(unit.before, results)
            results[unit] = unit.measure.one(rows[unit].whole(), unit.scale.vector, columns, eps)
        return results


def _norms(units: list[Unit], results: Results) -> Tensor:
    """The norms; NaN for a layer that is normalised to K and has become zero since the last step, or whose s is NaN.

    A scale that is sharded is not looked at: a single rank has it, and would leave the others waiting.
    """
    sigma = torch.stack([results[u].sigma for u in units])
    last = torch.cat([u.scale.last for u in units]).view(-1, 2)[:, 0].to(sigma)
    capped = [u.scale.scaling == "cap" for u in units]
    lost = (sigma == 0) & (last != 0)
    if any(capped):
        lost = torch.stack([x & (not c) for x, c in zip(lost, capped, strict=True)])
    scales: list[Tensor] = [s for u in units if (s := u.scale.s) is not None and not hasattr(s, "device_mesh")]
    if len(scales) == len(units):
        sigma = sigma + 0 * torch.cat(scales).to(sigma)
    return torch.where(lost, math.nan, sigma)


def _refuse(norms: Iterable[tuple[Unit, float]]) -> None:
    bad = [unit for unit, sigma in norms if not math.isfinite(sigma)]
    if bad:
        raise _no_norm(bad)


def _no_norm(units: Sequence[Unit]) -> ValueError:
    found = ", ".join(f"{u.name!r} ({_state(u)})" for u in units[:4]) + (", ..." if len(units) > 4 else "")
    return ValueError(
        f"expected weights with a norm that is finite and, once it was, not zero, got layers {found}; nothing was "
        "normalised in this step: look for a learning rate that is too large, or a weight that was overwritten"
    )


def _state(unit: Unit) -> str:
    rows, s = Rows.of(unit.weight), unit.scale.s
    if rows.group is not None:
        return "zero, NaN or infinite, here or on another rank"
    if s is not None and not s.isfinite().all():
        return "its scale s is NaN or infinite"
    weight = rows.tensor
    return "zero" if not weight.any() else "NaN or infinite" if not weight.isfinite().all() else "its norm overflows"


def _write(units: list[Unit], rows: dict[Unit, Rows], results: Results, sigma: Tensor, good: Tensor | None) -> Tensor:
    """Scale the weights, unless `good` is false, and keep what the next step needs; (2, units): σ and residuals."""
    projected = [u for u in units if u.scale.update == "project"]
    factors = _factors(projected, results, good)
    if projected:
        spread = [u.spread(f, rows[u]) for u, f in zip(projected, factors, strict=True)]
        torch._foreach_mul_([rows[u].tensor for u in projected], spread)
    zero = sigma.new_zeros(())
    residuals = torch.stack([zero if (r := results[u].residual) is None else r.to(sigma) for u in units])
    values = torch.stack([sigma, residuals])
    kept = [(u, v) for u, v in zip(units, values.T.unbind(), strict=True) if not u.settled]
    if kept:
        torch._foreach_copy_([u.scale.last for u, _ in kept], [v for _, v in kept])
        torch._foreach_add_([u.scale.steps for u, _ in kept], 1)
    moved = [(u.scale.vector, results[u].vector) for u, _ in kept]
    pairs = [(state, v) for state, v in moved if state is not None and v is not None]
    if pairs:
        states, vectors = zip(*pairs, strict=True)
        found = vectors if good is None else [torch.where(good, v, s) for s, v in pairs]
        torch._foreach_copy_(states, found)
    for unit in units:
        if not unit.weight.requires_grad:
            unit.seen = unit.weight._version
    return values


def _factors(units: list[Unit], results: Results, good: Tensor | None) -> list[Tensor]:
    """What each base weight is multiplied by, computed together for units with the same rule."""
    factors: dict[Unit, Tensor] = {}
    alike: dict[tuple[object, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        alike[(unit,) if unit.per_channel else (unit.scale.scaling, unit.scale.K, unit.margin, unit.settled)].append(
            unit
        )
    for some in alike.values():
        unit = some[0]
        values = results[unit].channels if unit.per_channel else torch.stack([results[u].sigma for u in some])
        assert values is not None
        found = unit.factors(values)
        found = found if good is None else torch.where(good, found, 1.0)
        factors |= {unit: found} if unit.per_channel else zip(some, found.unbind(), strict=True)
    return [factors[unit] for unit in units]
