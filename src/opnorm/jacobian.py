"""A lower bound of a Lipschitz constant: ‖J(x)v‖/‖v‖ ≤ L at any x and v, by power iteration and ascent in x."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opnorm.rules.graph import evaluating

Function = Callable[[Tensor], Tensor]
LARGE = 2**14  # numbers in an input beyond which the search is a short one, in single precision


@dataclass(frozen=True)
class Steepest:
    """The largest ‖J(x)v‖/‖v‖ found, and where."""

    value: float
    input: Tensor
    direction: Tensor


def steepest(
    model: nn.Module, inputs: Tensor, *, ord: float = 2, iterations: int | None = None, ascent: int | None = None,
    seed: int = 0, output: int | None = None,
) -> Steepest:  # fmt: skip
    """max over inputs of ‖J(x)‖, from below: the value in double precision, the search on large inputs in single.

    Args:
        model: the network, in eval mode while this runs.
        inputs: starting points, (n, *input_shape).
        ord: the norm.
        iterations: power iterations at every starting point: v ← Jᵀψ(Jv), ψ the dual of the norm (Boyd 1974). None:
            20, or 3 for inputs of more than 2¹⁴ numbers, such as images of 224×224, where one takes a second.
        ascent: steps in x towards a larger ‖J(x)v‖, along its gradient, along v, and at random; only gains are kept.
            None: 9, or 2.
        seed: of the starting vectors and the random steps.
        output: which output to take if the model has several; all of them by default.
    """
    generator = torch.Generator().manual_seed(seed)
    large = inputs[:1].numel() > LARGE
    iterations = (3 if large else 20) if iterations is None else iterations
    ascent = (2 if large else 9) if ascent is None else ascent
    dtype = torch.float32 if large else torch.float64
    function = _function(model, output, dtype)
    best: Steepest | None = None
    with evaluating(model):
        for x in inputs.detach().to(dtype):
            found = _climb(function, x[None], ord, iterations, ascent, generator)
            if best is None or found.value > best.value:
                best = found
        if large and best is not None:
            best = _confirmed(_function(model, output, torch.float64), best, ord)
    if best is None:
        raise ValueError("expected at least one input to start from, got none")
    return best


def _confirmed(function: Function, found: Steepest, ord: float) -> Steepest:
    """What was found in single precision, evaluated in double: the search may round, the value may not."""
    x, v = found.input[None].double(), found.direction[None].double()
    y = torch.func.jvp(function, (x,), (v,))[1]
    value = float(torch.linalg.vector_norm(y, ord) / torch.linalg.vector_norm(v, ord))
    return Steepest(value, x[0], v[0])


def _climb(
    function: Function, x: Tensor, ord: float, iterations: int, ascent: int, generator: torch.Generator
) -> Steepest:
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    value, v = _power(function, x, v, ord, iterations)
    size = 0.1 * float(x.std()) if x.numel() > 1 and float(x.std()) > 0 else 0.1
    size *= math.sqrt(x.numel())
    for step in range(ascent):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        direction = (_uphill(function, x, v), v, noise)[step % 3]
        length = float(direction.norm())
        if not 0 < length < math.inf:
            continue
        moved = x + size / length * direction
        new, w = _power(function, moved, v, ord, 3)
        if new > value:
            x, v, value, size = moved, w, new, 2 * size
        else:
            size /= 2
    value, v = _power(function, x, v, ord, iterations)
    return Steepest(value, x[0], v[0])


def _power(function: Function, x: Tensor, v: Tensor, ord: float, iterations: int) -> tuple[float, Tensor]:
    """The largest ‖Jv‖/‖v‖ met, and its v."""
    best, kept = 0.0, v
    pull = torch.func.vjp(function, x)[1]
    for _ in range(max(iterations, 1)):
        v = v / torch.linalg.vector_norm(v, ord).clamp(min=torch.finfo(v.dtype).tiny)
        y = torch.func.jvp(function, (x,), (v,))[1]
        value = float(torch.linalg.vector_norm(y, ord))
        if not math.isfinite(value):
            break
        if value > best:
            best, kept = value, v
        (w,) = pull(_dual(y, ord))
        w = _dual(w, _conjugate(ord))
        if float(w.abs().max()) == 0:
            break
        v = w
    return best, kept


def _dual(y: Tensor, ord: float) -> Tensor:
    """The gradient of ‖y‖: what is paired with y at its best."""
    if ord == 1:
        return y.sign()
    if ord == math.inf:
        flat = torch.zeros_like(y).reshape(-1)
        index = y.abs().argmax()
        flat[index] = y.reshape(-1)[index].sign()
        return flat.reshape(y.shape)
    return y / torch.linalg.vector_norm(y).clamp(min=torch.finfo(y.dtype).tiny)


def _conjugate(ord: float) -> float:
    return {1.0: math.inf, math.inf: 1.0}.get(float(ord), 2.0)


def _uphill(function: Function, x: Tensor, v: Tensor) -> Tensor:
    """The gradient of ‖J(x)v‖² in x; zero for piecewise linear networks."""

    def squared(z: Tensor) -> Tensor:
        y = torch.func.jvp(function, (z,), (v,))[1]
        return y.square().sum()

    try:
        return torch.func.grad(squared)(x)
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return torch.zeros_like(x)


def _function(model: nn.Module, output: int | None, dtype: torch.dtype) -> Function:
    state = {
        name: t.detach().to(dtype) if t.is_floating_point() else t
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }

    def function(x: Tensor) -> Tensor:
        result = torch.func.functional_call(model, state, (x,))
        tensors = [t for t in _tensors(result) if t.is_floating_point()]
        chosen = tensors if output is None else [tensors[output]]
        return torch.cat([t.reshape(-1) for t in chosen])

    return function


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
