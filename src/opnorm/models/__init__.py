"""Published architectures without batch norm, so that the norms of their layers bound the network.

`build("ds_resnet34", num_classes=10)` makes one by name; `MODELS` lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opnorm.models.convnet import ds_convnet
from opnorm.models.mobilenet import MobileNetV2, mobilenet_v2
from opnorm.models.resnet import DSResNet, ds_resnet34
from opnorm.models.separable import SeparableConv2d

MODELS: dict[str, Callable[..., nn.Module]] = {
    "ds_convnet": ds_convnet,
    "ds_resnet34": ds_resnet34,
    "mobilenet_v2": mobilenet_v2,
}


def build(name: str, **kwargs: Any) -> nn.Module:
    """The built-in model of this name; `kwargs` go to its function."""
    if name not in MODELS:
        raise ValueError(f"expected a model among {', '.join(sorted(MODELS))}, got {name!r}")
    return MODELS[name](**kwargs)


__all__ = ["MODELS", "DSResNet", "MobileNetV2", "SeparableConv2d", "build", "ds_convnet", "ds_resnet34", "mobilenet_v2"]
