"""‖K‖_∞ and ‖K‖_1, exactly: the largest sum of absolute entries of a row, or of a column, of the dense matrix.

Rows differ only where the window reaches into the padding, and so do columns. Each axis therefore has few patterns of
which taps are dropped or fall on the same input, and the largest sum is found by trying their combinations.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from opnorm.bound import working_weight
from opnorm.geometry import Axis
from opnorm.norms.groups import group_weights
from opnorm.operator import ConvOperator


def induced_norm(operator: ConvOperator, *, rows: bool) -> Tensor:
    """max over rows (‖·‖_∞) or columns (‖·‖_1) of Σ |entries|, in the precision of the weight, at least float32."""
    geometry = operator.geometry
    weight, scale = working_weight(operator.weight)
    weights = group_weights(weight, geometry)  # of the adjoint if transposed, whose rows are our columns
    rows = rows != geometry.transposed
    patterns = [_row_patterns(axis) if rows else _column_patterns(axis) for axis in geometry.axes]
    sums = [_row_sums(weights, choice, rows) for choice in itertools.product(*patterns)]
    return scale * torch.stack(sums).amax()


def _row_sums(weights: Tensor, choice: Sequence[tuple[tuple[int, ...], ...]], rows: bool) -> Tensor:
    """The largest sum of absolute entries, where each axis adds its taps up in the given sets, one set an entry."""
    merged = weights
    for sets in choice:
        select = torch.zeros(merged.shape[3], len(sets), dtype=merged.dtype)
        for column, taps in enumerate(sets):
            select[list(taps), column] = 1
        merged = torch.tensordot(merged, select.to(merged.device), dims=([3], [0]))
    over = [2 if rows else 1, *range(3, merged.dim())]
    return merged.abs().sum(over).amax()


def _row_patterns(axis: Axis) -> set[tuple[tuple[int, ...], ...]]:
    """For each output, the sets of taps that fall on the same input."""
    if axis.inputs is None:
        return {tuple((tap,) for tap in range(axis.kernel))}  # every other pattern drops or cancels some of these
    found = set()
    for i in range(axis.size[1]):
        inputs: dict[int, list[int]] = defaultdict(list)
        for tap, source in enumerate(axis.reads(i)):
            if source is not None:
                inputs[source].append(tap)
        found.add(tuple(sorted(map(tuple, inputs.values()))))
    return found


def _column_patterns(axis: Axis) -> set[tuple[tuple[int, ...], ...]]:
    """For each input, the sets of taps with which the outputs read it, one set an output."""
    if axis.inputs is None:
        return _columns_of_any_size(axis)
    inputs: dict[int, dict[int, list[int]]] = {q: defaultdict(list) for q in range(axis.inputs)}
    for i in range(axis.size[1]):
        for tap, source in enumerate(axis.reads(i)):
            if source is not None:
                inputs[source][i].append(tap)
    return {tuple(sorted(map(tuple, outputs.values()))) for outputs in inputs.values()}


def _columns_of_any_size(axis: Axis) -> set[tuple[tuple[int, ...], ...]]:
    """Far from the border, the taps that read an input are those at one residue modulo the stride."""
    if axis.mode != "zeros":
        raise ValueError(
            f"expected an input size for this norm with {axis.mode} padding, got None; choose one with geometry.at(...)"
        )
    residues: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for tap in range(axis.kernel):
        residues[axis.dilation * tap % axis.stride].append((tap,))
    return {tuple(taps) for taps in residues.values()}
