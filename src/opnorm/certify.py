"""`certify`: a proven Lipschitz constant of a network, ‖f(x) - f(y)‖ ≤ L‖x - y‖, and where it comes from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opnorm.jacobian import steepest
from opnorm.responses import Response, worst_responses
from opnorm.rules.composition import Composer
from opnorm.rules.expression import Value
from opnorm.rules.graph import Network, Refusal, evaluating, exported, interpreted
from opnorm.rules.steps import Share

_FORMAT = 1  # of the JSON


@dataclass(frozen=True)
class LayerShare:
    """One row of a certificate: an operation, its own constant, and what it contributes to the bound.

    Attributes:
        name: the module path, or the name of the operation where it is outside of all modules.
        op: the ATen operation.
        alone: its constant by itself.
        value: the number that it contributes; smaller than `alone` where it was merged with others or folded into them.
        guarantee: what is known of it, `"exact"` or `"upper"`.
        method: how it was found.
        input_size: the spatial size, or the shape, that it works on.
        saving: the part of the bound that merging saves at this row, 1 - value/alone of all that went into it.
        note: what was merged, folded or added.
        total: the bound up to and including this operation.
    """

    name: str
    op: str
    alone: float
    value: float
    guarantee: str
    method: str
    input_size: tuple[int | None, ...]
    saving: float
    note: str
    total: float


@dataclass(frozen=True)
class Certificate:
    """An upper bound of a network's Lipschitz constant, a lower bound beside it, and the table of where it comes from.

    Attributes:
        bound: L with ‖f(x) - f(y)‖ ≤ L‖x - y‖ for all inputs of the shape, in eval mode and exact arithmetic.
        lower: the largest Jacobian norm found; the true constant lies between the two. None if it was not asked for.
        layers: one row an operation whose constant is not 1, in the order of computation.
        ord: the norm, 1, 2 or inf.
        input_shape: without the batch; None for a size that may be anything in the range that `sizes` gives.
        composition: `"merged"` or `"product"`.
        product: the plain product, for comparison.
        times: seconds, by stage.
        responses: kernels of the layers that contribute most, in frequency.
    """

    bound: float
    lower: float | None
    layers: tuple[LayerShare, ...]
    ord: float
    input_shape: tuple[int | None, ...]
    composition: str
    product: float
    model: str
    sizes: str = ""
    times: Mapping[str, float] = field(default_factory=dict)
    responses: tuple[Response, ...] = field(default=(), repr=False)

    @property
    def ratio(self) -> float | None:
        """upper/lower: how much larger than the truth the bound can be at most."""
        return None if self.lower is None or self.lower == 0 else self.bound / self.lower

    def radius(self, logits: Tensor) -> Tensor:
        """margin/(√2·L): no change of the input smaller than this changes the predicted class.

        Two logits move apart by at most √2‖Δf‖₂, 2‖Δf‖∞ or ‖Δf‖₁.

        Args:
            logits: (..., classes).
        """
        if not isinstance(logits, Tensor) or logits.dim() == 0 or logits.shape[-1] < 2:
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"expected logits of at least two classes in the last dimension, got {got}; pass model(inputs)"
            )
        best = logits.detach().double().topk(2, dim=-1).values
        apart = {1.0: 1.0, 2.0: math.sqrt(2.0)}.get(float(self.ord), 2.0) * (1 + 1e-15)
        if self.bound == 0:
            return torch.full_like(best[..., 0], math.inf)
        return (best[..., 0] - best[..., 1]) / (apart * self.bound)

    @torch.no_grad()
    def certified_accuracy(
        self, model: nn.Module, loader: Iterable[Any], epsilons: Sequence[float]
    ) -> dict[float, float]:
        """The part of the samples that are classified rightly, and stay so under every change up to ε, for each ε.

        Args:
            model: the certified network.
            loader: batches (inputs, labels).
            epsilons: the ε; 0 gives the plain accuracy.
        """
        if not isinstance(epsilons, Iterable) or not all(e >= 0 for e in epsilons):
            raise ValueError(f"expected epsilons as numbers of at least 0, got {epsilons!r}; for instance [0, 0.14]")
        count, right = 0, [0] * len(epsilons)
        with evaluating(model):
            for inputs, labels in loader:
                logits = model(inputs)
                correct = logits.argmax(-1) == labels
                radius = self.radius(logits)
                count += len(labels)
                right = [
                    r + int((correct & ((radius > e) | (e == 0))).sum()) for r, e in zip(right, epsilons, strict=True)
                ]
        if count == 0:
            raise ValueError("expected a loader with at least one batch, got none")
        return {float(e): r / count for e, r in zip(epsilons, right, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings; infinity as the string "inf"."""
        fields = asdict(replace(self, times=dict(self.times)))
        fields["ratio"], fields["format"] = self.ratio, _FORMAT
        fields["ord"] = "inf" if self.ord == math.inf else int(self.ord)
        return fields

    def to_json(self, indent: int | None = 2) -> str:
        """The certificate as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """The certificate as one self-contained page: nothing is loaded from anywhere."""
        from opnorm.report import certificate_page

        return certificate_page(self.to_dict())

    def plot(self, axes: Any = None) -> Any:
        """The bound after every operation, on a log scale, as a matplotlib figure; `axes` to draw into."""
        from opnorm.report import certificate_figure

        return certificate_figure(self, axes)

    def table(self, most: int | None = None) -> str:
        """The rows as text."""
        rows = self.layers if most is None else self.layers[:most]
        lines = [
            f"{'layer':<34} {'op':<18} {'alone':>10} {'share':>10} {'saving':>7} {'bound so far':>13}  "
            "guarantee  method, note"
        ]
        for r in rows:
            saving = f"{r.saving:6.1%}" if r.saving > 5e-4 else ""
            lines.append(
                f"{_short(r.name, 34):<34} {_short(r.op, 18):<18} {r.alone:>10.4g} {r.value:>10.4g} {saving:>7} "
                f"{above(r.total, 5):>13}  "
                f"{r.guarantee:<9}  {r.method}{'; ' + r.note if r.note else ''}"
            )
        if len(rows) < len(self.layers):
            lines.append(f"… {len(self.layers) - len(rows)} more rows")
        return "\n".join(lines)

    def __str__(self) -> str:
        size = "×".join("any" if n is None else str(n) for n in self.input_shape)
        norm = {1.0: "1", 2.0: "2"}.get(float(self.ord), "∞")
        lines = [f"{self.model} on {size}: ‖f(x) - f(y)‖{_SUB[norm]} ≤ {above(self.bound)} ‖x - y‖{_SUB[norm]}"]
        if self.lower is not None:
            ratio = (
                f"; the upper bound is at most {above(self.ratio, 3)} times the truth" if self.ratio is not None else ""
            )
            lines.append(f"lower bound {_below(self.lower)}{ratio}")
        if self.product > self.bound * 1.001:
            lines.append(
                f"the plain product of all layers is {self.product:.6g}, {self.product / self.bound:.3g} times larger"
            )
        if self.sizes:
            lines.append(f"for every input with {self.sizes}")
        lines.append("time: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.times.items()))
        return "\n".join([*lines, "", self.table()])


_SUB = {"1": "₁", "2": "₂", "∞": "∞"}


def certify(
    model: nn.Module, input_shape: Sequence[int | None], *, ord: float = 2,
    composition: Literal["merged", "product"] = "merged", output: int | None = None, lower: bool = True,
    inputs: Tensor | int = 2, iterations: int | None = None, ascent: int | None = None, seed: int = 0,
) -> Certificate:  # fmt: skip
    """L with ‖f(x) - f(y)‖ ≤ L‖x - y‖ for a network f in eval mode, one sample at a time.

    The graph of `torch.export` is interpreted: what depends on weights alone is evaluated, what depends on the input
    gets a bound, by one registered rule an operation. Consecutive linear maps are merged where that is smaller.

    Args:
        model: maps one tensor to one or several.
        input_shape: of one sample, without the batch, e.g. (3, 224, 224). None for a size that may vary.
        ord: the norm of input and output: 2, 1 or `math.inf`.
        composition: `"merged"`, or `"product"` for the plain product of all constants.
        output: which output to bound where there are several; by default all of them together, as one vector.
        lower: whether to look for a large Jacobian norm, a lower bound.
        inputs: where to look: a tensor (n, *input_shape), or a number of Gaussian samples.
        iterations: power iterations of the lower bound, see `opnorm.jacobian.steepest`.
        ascent: its steps in the input.
        seed: of its random numbers.

    Raises:
        ValueError: where operations have no rule, or no Lipschitz constant; all of them are listed.

    Examples:
        >>> import torch, opnorm
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 10))
        >>> certificate = opnorm.certify(model, (1, 8, 8))
        >>> certificate.lower <= certificate.bound
        True
    """
    shape = _checked_shape(input_shape)
    _check_arguments(model, ord, composition)
    clock = _Clock()
    program = exported(model, shape, _dtype(model))
    clock.lap("export")
    network = interpreted(program, shape, float(ord))
    value = _output(network, output)
    _raise_refusals(network.refusals, model)
    clock.lap("interpretation")
    composer = Composer(float(ord), merge=composition == "merged")
    bound = composer.solve(value)
    clock.lap("norms")
    plain = Composer(float(ord), merge=False, weigher=composer.weigher).solve(value).value
    rows = _rows(composer.shares(value), network)
    responses = worst_responses(composer.shares(value))
    clock.lap("table")
    certificate = Certificate(
        bound.value,
        None,
        rows,
        float(ord),
        shape,
        composition,
        plain,
        type(model).__name__,
        network.sizes,
        clock.laps,
        responses,
    )
    if not math.isfinite(bound.value):
        raise ValueError(f"expected a finite bound, got {bound.value}; look for weights that are NaN or infinite")
    if not lower:
        return certificate
    starts = _starts(inputs, shape, seed, model)
    found = steepest(model, starts, ord=float(ord), iterations=iterations, ascent=ascent, seed=seed, output=output)
    clock.lap("lower bound")
    return replace(certificate, lower=found.value, times=clock.laps)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._start = now - self._start, now


def _checked_shape(input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
    shape = tuple(input_shape) if isinstance(input_shape, Iterable) else ()
    if not shape or not all(n is None or _is_size(n) for n in shape):
        raise ValueError(
            f"expected input_shape as positive integers, None for a free size, without the batch, got {input_shape!r}; "
            "for instance (3, 224, 224)"
        )
    return tuple(None if n is None else int(n) for n in shape)


def _is_size(n: Any) -> bool:
    return hasattr(n, "__index__") and not isinstance(n, bool) and n >= 1


def _check_arguments(model: nn.Module, ord: float, composition: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if ord not in (1, 2, math.inf):
        raise ValueError(f"expected ord as 1, 2 or math.inf, got {ord!r}")
    if composition not in ("merged", "product"):
        raise ValueError(f"expected composition as 'merged' or 'product', got {composition!r}")
    bad = [name for name, p in model.named_parameters() if p.is_meta]
    if bad:
        raise ValueError(
            f"expected weights with values, got {len(bad)} on the meta device ({bad[0]}, …); materialise the model"
        )
    broken = [
        n
        for n, p in (*model.named_parameters(), *model.named_buffers())
        if p.is_floating_point() and not bool(p.isfinite().all())
    ]
    if broken:
        raise ValueError(f"expected finite weights, got NaN or infinity in {', '.join(broken[:5])}")


def _dtype(model: nn.Module) -> torch.dtype:
    state = (*model.parameters(), *model.buffers())
    return next((t.dtype for t in state if t.is_floating_point()), torch.get_default_dtype())


def _output(network: Network, output: int | None) -> Value:
    if not network.outputs:
        if network.refusals:
            return network.source
        raise ValueError("expected an output that depends on the input, got none")
    if output is None:
        return network.output
    if not -len(network.outputs) <= output < len(network.outputs):
        raise ValueError(f"expected output below {len(network.outputs)}, the number of outputs, got {output}")
    return network.outputs[output]


def _raise_refusals(refusals: Sequence[Refusal], model: nn.Module) -> None:
    """One error with every operation that has no bound."""
    if not refusals:
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for r in refusals:
        groups.setdefault((r.where.op, r.reason), []).append(r.where.path or "(top level)")
    lines = []
    for (op, reason), paths in groups.items():
        distinct = list(dict.fromkeys(paths))
        shown = ", ".join(distinct[:6]) + (f", … ({len(distinct)} places)" if len(distinct) > 6 else "")
        lines.append(f"  {op}: {reason}\n    at {shown}")
    raise ValueError(
        f"expected operations with a Lipschitz constant, got {len(refusals)} in {type(model).__name__} without one:\n"
        + "\n".join(lines)
        + "\nReplace them, or, where you know a constant, add a rule:\n"
        "  @opnorm.lipschitz_rule(torch.ops.aten.NAME.default)\n"
        "  def rule(call): return CONSTANT  # see docs/certify.md"
    )


def _rows(shares: Sequence[Share], network: Network) -> tuple[LayerShare, ...]:
    """Rows in the order of the graph; those that change nothing are left out."""
    order = {name: i for i, name in enumerate(network.order)}
    shares = sorted(shares, key=lambda s: order.get(s.where.node, len(order)))
    return tuple(
        LayerShare(
            s.where.path or s.where.op,
            s.where.op,
            s.alone,
            s.value,
            s.guarantee,
            s.method,
            tuple(s.shape[1:]),
            s.saving,
            s.note,
            s.total,
        )
        for s in shares
        if s.note or abs(s.alone - 1) > 1e-9 or abs(s.value - 1) > 1e-9
    )


def _starts(inputs: Tensor | int, shape: tuple[int | None, ...], seed: int, model: nn.Module) -> Tensor:
    concrete = tuple(32 if n is None else n for n in shape)
    if isinstance(inputs, Tensor):
        if len(inputs.shape) != len(shape) + 1 or any(
            n is not None and n != m for n, m in zip(shape, inputs.shape[1:], strict=True)
        ):
            raise ValueError(f"expected inputs of shape (n, {', '.join(map(str, shape))}), got {tuple(inputs.shape)}")
        return inputs
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.randn((int(inputs), *concrete), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        device
    )


def above(value: float, digits: int = 6) -> str:
    """A number in `digits` digits, rounded up, so that what is printed is a bound too."""
    return format(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value), "g")


def _below(value: float) -> str:
    return format(Context(prec=6, rounding=ROUND_FLOOR).create_decimal_from_float(value), "g")


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]
