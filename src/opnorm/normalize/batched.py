"""The norms of all layers together: channels stacked, power iterations in step, a few calls for a whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from opnorm.bound import Method
from opnorm.geometry import ConvGeometry
from opnorm.normalize.maps import Convolution, Matrix
from opnorm.normalize.measure import Channels, Iterated, Measured, host_may_look, proved
from opnorm.normalize.screening import Form, largest
from opnorm.normalize.shards import Rows, reduced
from opnorm.normalize.units import Kinds, Unit
from opnorm.norms.fourier import FourierBound
from opnorm.operator import ConvOperator

Results = dict[Unit, Measured]


@torch.no_grad()
def measure_all(
    units: Sequence[Unit], rows: dict[Unit, Rows], counts: dict[Unit, int] | None, eps: float | None
) -> Results:
    """The norms of the base weights of `units`.

    Args:
        rows: what this rank holds of each weight.
        counts: how often to iterate each unit; None: until the residual is at most its eps, which looks at values.
        eps: replaces the eps of the units' methods.
    """
    kinds = Kinds.of(units)
    results = _screened([u for u in kinds.channels if _screens(u, rows[u])], rows)
    results |= _channels([u for u in kinds.channels if u not in results], rows)
    for unit in kinds.others:
        results[unit] = unit.measure.one(rows[unit].whole(), unit.scale.vector, None, eps)
    results |= _iterated(kinds.iterated, rows, results, counts, eps)
    return results


# Depthwise layers


def _screens(unit: Unit, rows: Rows) -> bool:
    measure = unit.measure
    whole = rows.group is None and host_may_look(rows.tensor)
    return whole and isinstance(measure, Channels) and measure.wants_largest_only


def _screened(units: Sequence[Unit], rows: dict[Unit, Rows]) -> Results:
    """The largest channel of each layer, without the others' norms."""
    calls: list[tuple[Unit, Form]] = []
    for unit in units:
        assert isinstance(unit.measure, Channels)
        calls += [(unit, form) for form in unit.measure.forms]
    norms = largest([form for _, form in calls], [rows[unit].tensor for unit, _ in calls])
    found: dict[Unit, list[Tensor]] = defaultdict(list)
    for (unit, _), value in zip(calls, norms, strict=True):
        found[unit].append(value)
    return {unit: Measured(torch.stack(v).amax() if len(v) > 1 else v[0]) for unit, v in found.items()}


def _channels(units: Sequence[Unit], rows: dict[Unit, Rows]) -> Results:
    """For each method one call with all its layers, which stacks those that share a grid."""
    by_method: dict[Method, list[tuple[Unit, ConvGeometry]]] = defaultdict(list)
    for unit in units:
        for geometry in unit.measure.geometries:
            by_method[unit.measure.method].append((unit, geometry))
    found: dict[Unit, list[Tensor]] = defaultdict(list)
    for method, calls in by_method.items():
        assert isinstance(method, FourierBound)
        here = [(unit, *_local(geometry, rows[unit])) for unit, geometry in calls]
        bounds = iter(method.compute_all([ConvOperator(g, w) for _, g, w in here if g is not None]))
        for unit, local, _ in here:
            found[unit].append(_placed(unit, rows[unit], None if local is None else next(bounds).per_channel))
    every = [torch.stack(found[unit]).amax(0) if len(found[unit]) > 1 else found[unit][0] for unit in units]
    groups = [rows[unit].group if _splits(unit.geometry, rows[unit]) else None for unit in units]
    every = reduced(every, groups)  # a channel is zero but on the rank that has it
    return {unit: Measured(channels.amax(), channels) for unit, channels in zip(units, every, strict=True)}


def _splits(geometry: ConvGeometry, rows: Rows) -> bool:
    """Whether the ranks hold whole channels; otherwise the weight is gathered."""
    return rows.group is not None and rows.chunk % (rows.total // geometry.groups) == 0


def _local(geometry: ConvGeometry, rows: Rows) -> tuple[ConvGeometry | None, Tensor]:
    """The layer made of the channels that this rank holds; None if it holds none."""
    if not _splits(geometry, rows):
        return geometry, rows.whole()
    groups = len(rows.tensor) // (rows.total // geometry.groups)
    if not groups:
        return None, rows.tensor
    values: dict[str, Any] = {f.name: getattr(geometry, f.name) for f in fields(geometry)}
    share = {name: values[name] // geometry.groups * groups for name in ("in_channels", "out_channels")}
    return ConvGeometry(**values | share | {"groups": groups}), rows.tensor


def _placed(unit: Unit, rows: Rows, channels: Tensor | None) -> Tensor:
    """The norms of this rank's channels among those of all channels."""
    if not _splits(unit.geometry, rows):
        assert channels is not None
        return channels
    groups, each = unit.geometry.groups, rows.total // unit.geometry.groups
    full = rows.tensor.new_zeros(groups, dtype=torch.promote_types(rows.tensor.dtype, torch.float32))
    if channels is not None:
        full[rows.first // each : rows.first // each + len(channels)] = channels
    return full


# Pointwise, linear and dense layers


@dataclass
class _State:
    """One power iteration among many; lengths, sizes and residuals are those of `advance`."""

    unit: Unit
    linear: Matrix | Convolution
    group: Any
    vector: Tensor
    length: Tensor
    size: Tensor
    residual: Tensor


def _iterated(
    units: Sequence[Unit], rows: dict[Unit, Rows], results: Results, counts: dict[Unit, int] | None, eps: float | None
) -> Results:
    states = [_begin(unit, rows[unit], results) for unit in units]
    todo, done = states, 0
    while todo:
        _advance(todo)
        done += 1
        if counts is not None:
            todo = [s for s in todo if counts[s.unit] > done]
        else:
            todo = _unfinished(todo, done, eps)
    return _measured(states, rows)


def _begin(unit: Unit, rows: Rows, results: Results) -> _State:
    measure, columns, vector = unit.measure, None, unit.scale.vector
    assert isinstance(measure, Iterated) and vector is not None
    if unit.before is not None:
        columns = relative(unit.before, results)
    group = rows.group if measure.is_matrix else None  # a dense convolution is gathered
    wide = torch.promote_types(rows.tensor.dtype, torch.float32)
    weight, v = (rows.tensor if measure.is_matrix else rows.whole()).to(wide), vector.to(wide)
    return _State(unit, measure.map(weight, columns), group, v, v, v, v)  # lengths are found by the first iteration


def relative(before: Unit, results: Results) -> Tensor:
    """The norms of the channels of a depthwise layer after its normalisation, in units of its K."""
    channels = results[before].channels
    assert channels is not None
    sigma = channels if before.per_channel else channels.amax()
    factors = before.factors(sigma)
    return channels * factors / (before.scale.K if before.scale.scaling == "cap" else 1.0)


def _advance(states: list[_State]) -> None:
    """One power iteration of each, as `measure.advance` does it for one.

    Norms are added up in float64, since squares of small numbers vanish; what is done with them is done for all states
    at once.
    """
    groups, dtype = [s.group for s in states], states[0].vector.dtype
    start = torch._foreach_div([s.vector for s in states], _norms([s.vector for s in states]).to(dtype).unbind())
    images = [s.linear.matvec(v) for s, v in zip(states, start, strict=True)]
    lengths = _norms(images)
    if any(g is not None for g in groups):
        lengths = torch.stack([x.sqrt() for x in reduced([*lengths.square().unbind()], groups)])
    safe = torch.where(lengths > 0, lengths, 1.0)
    torch._foreach_div_(images, safe.to(dtype).unbind())
    backs = reduced([s.linear.rmatvec(y) for s, y in zip(states, images, strict=True)], groups)
    sizes = _norms(backs)
    rests = _norms(torch._foreach_sub(backs, torch._foreach_mul(start, lengths.to(dtype).unbind())))
    moved = torch._foreach_div(backs, torch.where(sizes > 0, sizes, 1.0).to(dtype).unbind())
    torch._foreach_addcmul_(moved, start, (sizes == 0).to(dtype).unbind())  # where A is zero, v stays
    found = torch.stack([lengths, sizes, rests / safe]).to(dtype).unbind(1)
    for state, vector, values in zip(states, moved, found, strict=True):
        state.vector = vector
        state.length, state.size, state.residual = values.unbind()


def _norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Euclidean norms (tensors,), in float64."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64))


def _unfinished(states: list[_State], done: int, eps: float | None) -> list[_State]:
    left = []
    for state, value in zip(states, torch.stack([s.residual for s in states]).tolist(), strict=True):
        method = state.unit.measure.method
        enough = method.eps if eps is None else eps  # type: ignore[attr-defined]
        if value > enough and done < method.max_iter:  # type: ignore[attr-defined]
            left.append(state)
    return left


def _measured(states: list[_State], rows: dict[Unit, Rows]) -> Results:
    """σ² = ‖Av‖²(1 + ρ) of all, or proofs, one at a time."""
    results: Results = {}
    plain: list[_State] = []
    for s in states:
        measure = s.unit.measure
        assert isinstance(measure, Iterated)
        if measure.method.prove and isinstance(s.linear, Matrix):
            matrix = rows[s.unit].whole().flatten(1).to(s.vector.dtype)
            sigma = proved(Matrix(matrix, s.linear.columns).dense(), s.size, measure.method.eps)
            results[s.unit] = Measured(sigma, None, s.vector, s.residual)
        else:
            plain.append(s)
    if plain:
        residuals = torch.stack([s.residual for s in plain])
        sigmas = torch.stack([s.length for s in plain]) * (1 + residuals).sqrt()
        for s, sigma in zip(plain, sigmas.unbind(), strict=True):
            factor = s.unit.measure.factor  # type: ignore[attr-defined]
            results[s.unit] = Measured(sigma if factor == 1 else factor * sigma, None, s.vector, s.residual)
    return results
