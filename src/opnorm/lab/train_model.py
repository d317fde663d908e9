"""What is trained: the model, its Normalizer, the optimizer, and the learning rate as a function of the step."""

from __future__ import annotations

import copy
import glob
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from opnorm.lab.arguments import read_settings
from opnorm.lab.cli import UsageError
from opnorm.lab.data import Data
from opnorm.lab.loading import build_model
from opnorm.lab.train_config import Train
from opnorm.models import MODELS, SeparableConv2d
from opnorm.normalize import Normalizer
from opnorm.norms import PowerIteration


class Standardize(nn.Module):
    """y = (x - mean)/std per channel, the first layer of a network that takes pixels from 0 to 1."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


@dataclass
class Network:
    """A model in training.

    Attributes:
        model: with its parametrized weights.
        bare: a copy from before, with plain weights; what it holds does not matter.
        normalizer: None for plain training.
        K_per: what has norm K.
    """

    model: nn.Module
    bare: nn.Module
    normalizer: Normalizer | None
    K_per: str

    @torch.no_grad()
    def plain(self) -> nn.Module:
        """The same network with plain modules that hold the effective weights.

        Not a copy of the model without its parametrizations: torch keeps these in a class that copies share, so that
        removing them from one breaks the other.
        """
        plain = copy.deepcopy(self.bare)
        values = {name: attrgetter(name)(self.model).detach().clone() for name in plain.state_dict()}
        plain.load_state_dict(values)
        return plain.to(next(iter(values.values())).device).eval()

    def scales(self) -> dict[str, float]:
        """The factor of each layer: K, or K·tanh(s)."""
        named = self.model.named_modules()
        found = {n.removesuffix(".parametrizations.weight.0"): m for n, m in named if hasattr(m, "value")}
        return {name: module.value() for name, module in found.items()} if self.normalizer else {}


def build_network(config: Train, data: Data, device: torch.device) -> Network:
    """The model on its device, each layer at its norm."""
    bare = build_model(config.model, factory_settings(config, len(data.classes), data.shape), config.seed)
    require_logits(bare, config.model, data)
    model = copy.deepcopy(bare).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    K_per, normalizer = "layer", None
    if config.normalize:
        K_per = _per(model, config)
        normalizer = _normalizer(model, data, config, K_per)
    return Network(model, bare, normalizer, K_per)


def factory_settings(config: Train, classes: int, shape: Sequence[int]) -> dict[str, Any]:
    """The arguments of the factory: the user's, and for built-in models what follows from the data."""
    factory = MODELS.get(config.model)
    accepted = inspect.signature(factory).parameters if factory else {}
    known = {"num_classes": classes, "in_channels": shape[0], "image_size": shape[1]}
    return {k: v for k, v in known.items() if k in accepted} | read_settings(config.arg)


def build_optimizer(config: Train, network: Network) -> Optimizer:
    """SGD with momentum or Adam; no decay of the s of soft scaling, whose size is what they mean."""
    scales = network.normalizer.scale_parameters() if network.normalizer else []
    held = {id(s) for s in scales}
    rest = [p for p in network.model.parameters() if id(p) not in held and p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": config.weight_decay}]
    groups += [{"params": scales, "weight_decay": 0.0}] if scales else []
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.Adam(groups, lr=config.lr)


def learning_rate(config: Train, step: int, steps: int) -> float:
    """The learning rate of a step, `steps` to an epoch: a function and no state, so that a run goes on anywhere."""
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "milestones":
        return config.lr * 0.1 ** sum(step >= m * steps for m in config.milestones)
    total = config.epochs * steps
    rise = max(1.0, 0.3 * total)
    if step < rise:
        return _between(config.lr / 25, config.lr, step / rise)
    return _between(config.lr, config.lr * 1e-4, (step - rise) / max(1.0, total - rise))


def _between(start: float, end: float, part: float) -> float:
    """From one value to the other along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


@torch.no_grad()
def require_logits(model: nn.Module, name: str, data: Data) -> None:
    """Refuse a model that does not fit the images or the classes, before it is trained for an hour."""
    training, wanted = model.training, (2, len(data.classes))
    try:
        output = model.eval()(torch.zeros(2, *data.shape, dtype=torch.float32))  # as batches are
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        shape = "×".join(map(str, data.shape))
        raise UsageError(f"expected a model for images of {shape}, got {name}: {reason}; see --arg") from error
    finally:
        model.train(training)
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != wanted:
        raise UsageError(
            f"expected a model with {wanted[1]} logits an image, {wanted} for two, got {found} from {name}; "
            f"pass --arg num_classes={wanted[1]} if that is its argument"
        )


def _per(model: nn.Module, config: Train) -> str:
    pairs = any(isinstance(module, SeparableConv2d) for module in model.modules())
    if config.K_per in ("pair", "joint") and not pairs:
        raise UsageError(
            f"expected --K-per layer for {config.model}, which has no opnorm.models.SeparableConv2d, got {config.K_per}"
        )
    return config.K_per or ("pair" if pairs else "layer")


def _normalizer(model: nn.Module, data: Data, config: Train, K_per: str) -> Normalizer:
    iteration = PowerIteration(eps=config.eps)
    try:
        return Normalizer(
            model, data.shape, config.K if K_per == "layer" else _limits(model, config.K), scaling=config.scaling,
            s_init=config.s_init, method={"pointwise": iteration, "linear": iteration}, joint=K_per == "joint",
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"{config.model} cannot be normalised: {error}") from error


def _limits(model: nn.Module, K: float) -> dict[str, float]:
    """{layer: its norm}, √K for both layers of a pair, so that the pair has norm at most K."""
    pairs = [name for name, module in model.named_modules() if isinstance(module, SeparableConv2d)]
    parts = {f"{name}.{part}".lstrip(".") for name in pairs for part in ("depthwise", "pointwise")}
    layers = [name for name, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear))]
    return {glob.escape(name): math.sqrt(K) if name in parts else K for name in layers}
