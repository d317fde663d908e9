"""`Normalizer` on weights that several layers share, and on layers that a forward pass calls again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opnorm
from opnorm import ConvOperator, Normalizer, PowerIteration, operator_norm, operators_of
from opnorm.norms import baselines


def true_norms(model: nn.Module, shape: tuple[int, ...]) -> list[float]:
    operators = operators_of(model, shape).values()
    return [float(operator_norm(ConvOperator(o.geometry, o.weight.detach()), guarantee="exact")) for o in operators]


def sharing(*layers: nn.Module) -> nn.Sequential:
    """Layers with one weight, all of whose entries are positive, so that low frequencies have the largest response."""
    layers[0].weight.data.abs_()
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers).double()


def strided() -> nn.Sequential:
    return sharing(nn.Conv2d(33, 33, 3, 2, 1, bias=False), nn.Conv2d(33, 33, 3, 1, 1, bias=False))


def reflecting() -> nn.Sequential:
    return sharing(
        nn.Conv2d(33, 33, 3, padding=1, bias=False), nn.Conv2d(33, 33, 3, padding=1, padding_mode="reflect", bias=False)
    )


def encoder_and_decoder() -> nn.Sequential:
    """Of which the second does not skip positions."""
    return sharing(
        nn.Conv2d(33, 35, 3, stride=2, padding=1, bias=False), nn.ConvTranspose2d(35, 33, 3, padding=1, bias=False)
    )


def depthwise_of_two_strides() -> nn.Sequential:
    return sharing(nn.Conv2d(5, 5, 3, 2, 1, groups=5, bias=False), nn.Conv2d(5, 5, 3, 1, 1, groups=5, bias=False))


def depthwise_and_dense() -> nn.Sequential:
    return sharing(nn.Conv2d(1, 5, 3, 2, 1, bias=False), nn.Conv2d(5, 5, 3, padding=1, groups=5, bias=False))


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (strided, 0.85),
        (reflecting, 0.5),  # ‖Pad‖ is bounded apart, which is loose on small images
        (encoder_and_decoder, 0.85),
        (depthwise_of_two_strides, 0.85),
        (depthwise_and_dense, 0.85),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("update", ["project", "differentiable"])
def test_a_weight_in_different_layers_has_the_largest_of_their_norms(
    make, share: float, batched: bool, update: str
) -> None:
    model = make()
    shape = (model[0].in_channels, 7, 6)
    norm = Normalizer(model, shape, K=1.5, batched=batched, update=update)
    for _ in range(3):
        with torch.no_grad():
            norm._units[0].weight.mul_(1.1)
        norm.step()
    assert model[0].weight is model[1].weight or torch.equal(model[0].weight, model[1].weight)
    assert 1.5 * share <= max(true_norms(model, shape)) <= 1.5 * (1 + 1e-6)


@pytest.mark.parametrize("method", [PowerIteration(), baselines.Farnia2018()], ids=str)
def test_a_state_serves_one_kind_of_layer(method: opnorm.Method) -> None:
    with pytest.raises(ValueError, match=r"layer '0'.*without a state for a weight that is used in 2 ways"):
        Normalizer(strided(), (33, 7, 6), K=1.0, method=method)


@pytest.mark.parametrize("shape", [(5,), None])
def test_a_layer_that_is_called_again_has_its_share_of_the_lipschitz_constant_again(shape: tuple | None) -> None:
    square, last = nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)
    model = nn.Sequential(square, nn.ReLU(), square, nn.ReLU(), square, last)
    norm = Normalizer(model, shape, lipschitz=16.0, guarantee="upper")
    several, once = (float(norm.norms()[name]) for name in ("0", "5"))
    calls = 4 if shape else 2  # without a forward pass nobody knows
    assert 16 * 0.95 <= several ** (calls - 1) * once <= 16
