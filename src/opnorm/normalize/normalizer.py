"""`Normalizer`: after every optimizer step, each layer of a model has the norm that was set for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from opnorm.bound import Guarantee, Method, NormBound
from opnorm.normalize.engine import Engine
from opnorm.normalize.selection import Limit, Pattern, Policy, patterns, units_of
from opnorm.normalize.shards import Rows
from opnorm.normalize.units import Unit
from opnorm.norms.functional import joint_norm, operator_norm
from opnorm.operator import ConvOperator


class Normalizer:
    """θ ← θ/‖K_θ‖ after each optimizer step, and weight = K·θ, or K·tanh(s)·θ, for all layers of a model together.

    torch's own spectral_norm divides by the norm of the reshaped kernel, which is another number than the norm of the
    layer, and goes through the layers one by one. Here the norm is that of the operator, on the layer's real input
    size, and a step for a whole model costs a few milliseconds.

    The weights become parametrized: `module.weight` is the effective weight, and the parameter that the optimizer sees
    is `module.parametrizations.weight.original`. What a step leaves for the next one is in the state dict of the model.

    Args:
        model: the network, with plain weights. Make the Normalizer before the optimizer, and before
            DistributedDataParallel or fully_shard.
        input_shape: of one input, as in `operators_of`: `(3, 32, 32)`. None, for the whole or for one size: any size.
        K: the norm of each layer; or {name pattern: norm}, of which the first pattern that fits counts.
        lipschitz: instead of K: the product of the norms of all layers. Each of the n layers gets lipschitz^(1/n); one
            that the forward pass calls again counts again. That bounds a network that is one chain of these layers and
            1-Lipschitz functions; residual branches add to it, and `opnorm.certify` says what holds for the network.
        scaling: `"hard"`: norm K; `"soft"`: K·tanh(s), s learned; `"cap"`: at most K.
        update: `"project"`: in place, after the optimizer step. `"differentiable"`: the division by the norm is part
            of the graph, and a step only moves the singular vectors on.
        s_init: where s starts.
        include: name patterns (`"features.*"`) or module types. Default: all convolutions and linear layers.
        exclude: the same, for layers to leave alone.
        method: one for all layers, or {kind: method} with the kinds of `ConvGeometry.kind`. Default: Fourier bounds for
            depthwise layers, warm-started power iteration for the others.
        guarantee: `"upper"`: no layer's norm exceeds K, which costs a factorisation of each matrix a step. Default:
            power iterations may leave it up to ε = 0.01 above.
        per_channel: scale each channel of a depthwise layer by its own norm.
        joint: bound a depthwise layer and the pointwise layer that alone reads its output together: their composition
            has norm K·K, the pointwise layer alone may have more.
        batched: False: layer by layer, the plain twin that tests compare with.
        other_shapes: further input shapes; the norm of a layer is then the largest on any of them.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        >>> norm = Normalizer(model, input_shape=(3, 6, 6), K=2.0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> norm.attach(optimizer)
    """

    def __init__(
        self,
        model: nn.Module,
        input_shape: Any,
        K: Limit = None,
        *,
        lipschitz: float | None = None,
        scaling: str = "hard",
        update: str = "project",
        s_init: float = 3.0,
        include: Pattern | Iterable[Pattern] | None = None,
        exclude: Pattern | Iterable[Pattern] = (),
        method: Method | Mapping[str, Method] | None = None,
        guarantee: Guarantee | None = None,
        per_channel: bool = False,
        joint: bool = False,
        batched: bool = True,
        other_shapes: Sequence[Any] = (),
    ):
        chosen = patterns(include), patterns(exclude) or ()
        policy = Policy(K, lipschitz, scaling, update, s_init, *chosen, method, guarantee, per_channel, joint)
        self.model, self.policy = model, policy
        self._units = units_of(model, [input_shape, *other_shapes], policy)
        self._engine = Engine(self._units, batched)
        self._handles: list[Any] = []
        self._optimizers: list[Optimizer] = []
        self._register()

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that are normalised."""
        return tuple(name for unit in self._units for name in unit.names)

    def step(self) -> None:
        """Normalise every layer; call it after each optimizer step, or once `attach`."""
        self._engine.step()

    def attach(self, *optimizers: Optimizer) -> None:
        """Run `step` after every step of these optimizers; one that a GradScaler skips changes no weight."""
        if not optimizers:
            raise ValueError("expected the optimizer to attach to, got none; pass it, or call step() yourself")
        self._require_parameters_in(self._optimizers + list(optimizers))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            self._optimizers.append(optimizer)

    def detach(self) -> None:
        """Undo `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []

    def scale_parameters(self) -> list[nn.Parameter]:
        """The s of soft scaling, one for each weight: for a learning rate of their own, or no weight decay."""
        return [unit.scale.s for unit in self._units if unit.scale.s is not None]

    @torch.no_grad()
    def norms(self, method: Method | str = "auto", guarantee: Guarantee | None = "upper") -> dict[str, NormBound]:
        """The norms of the effective weights as they are now; with `joint` also of pairs, as "first → second"."""
        self._engine.check()
        found: dict[str, NormBound] = {}
        for unit in self._units:
            operators = [ConvOperator(g, self._effective(unit)) for g in unit.measure.geometries]
            try:
                largest = max((operator_norm(o, method, guarantee=guarantee) for o in operators), key=float)
            except ValueError as error:
                raise ValueError(f"layer {unit.name!r}: {error}") from error
            found |= dict.fromkeys(unit.names, largest)
            if unit.before is not None:
                first = ConvOperator(unit.before.geometry, self._effective(unit.before))
                found[f"{unit.before.name} → {unit.name}"] = joint_norm(first, operators[0])
        return found

    def table(self) -> str:
        """The layers with their K, the factor in force, and their norms, to print."""
        norms = self.norms()
        lines = [("layer", "geometry", "K", "factor", "norm", "guarantee")]
        for unit in self._units:
            for name in unit.names:
                bound, scale = norms[name], unit.scale
                values = f"{scale.K:.4g}", f"{scale.value():.4g}", f"{float(bound):.5g}", bound.guarantee
                lines.append((name, str(unit.geometry), *values))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)

    @torch.no_grad()
    def remove(self) -> None:
        """Put the effective weights into plain modules, which have their old classes and parameters again."""
        self.detach()
        for unit in self._units:
            unit.bake()
        self._units = []
        self._engine = Engine([], True)

    def __repr__(self) -> str:
        p = self.policy
        K = f"K={p.K}" if p.lipschitz is None else f"lipschitz={p.lipschitz}"
        return f"Normalizer({len(self.layers)} layers, {K}, scaling={p.scaling!r}, update={p.update!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": [], "_optimizers": []}  # a copy is attached to nothing

    def _register(self) -> None:
        """Parametrize all layers and normalise them once; or leave the model as it was."""
        done: list[nn.Module] = []
        try:
            for unit in self._units:
                for module in unit.modules:
                    parametrize.register_parametrization(module, "weight", unit.scale, unsafe=True)
                    done.append(module)
                unit.scale.registered = True
            self._engine.start()
        except BaseException:
            for module in done:
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
            raise

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step()

    def _require_parameters_in(self, optimizers: list[Optimizer]) -> None:
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        if not any(id(unit.weight) in held for unit in self._units):
            raise ValueError("expected an optimizer of this model, got one that holds none of its normalised weights")
        absent = [
            u.name
            for u in self._units
            if u.scale.s is not None and u.scale.s.requires_grad and id(u.scale.s) not in held
        ]
        if absent:
            raise ValueError(
                f"expected an optimizer that holds the scales s, got one without those of {absent}; make it after the "
                'Normalizer, or call optimizer.add_param_group({"params": norm.scale_parameters()})'
            )

    def _effective(self, unit: Unit) -> Tensor:
        return unit.scale.effective(Rows.of(unit.weight).whole(), unit.scale.value())
