"""What docs/comparison.md says of other packages, run on those that are installed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import opnorm
from opnorm import ConvGeometry, ConvOperator, operator_norm

pytestmark = pytest.mark.filterwarnings("ignore")  # of what the packages themselves import and call


def true_norm(layer: nn.Module, size: int = 14) -> float:
    """The norm of a convolution as it is, on size×size pixels."""
    geometry = ConvGeometry.from_module(layer, (size, size))
    return float(operator_norm(ConvOperator(geometry, layer.weight.detach().double()), guarantee="exact"))


def depthwise(channels: int, **options: object) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, **options)  # type: ignore[arg-type]


def test_torch_leaves_depthwise_layers_on_either_side_of_one() -> None:
    dominant, blurs = depthwise(16), depthwise(256)
    with torch.no_grad():
        dominant.weight.mul_(1e-3)[0] = 1 / 9  # one average
        blurs.weight.fill_(1 / 9)
    for layer in (dominant, blurs):
        nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=50)
    assert true_norm(dominant) > 2.5
    assert true_norm(blurs) < 0.3


def layer_of(module: str, name: str, **options: object) -> nn.Sequential:
    found = pytest.importorskip(module, reason="the extra bench is not installed")
    return nn.Sequential(getattr(found, name)(3, 6, 3, padding=1, **options))


def of_torch() -> nn.Sequential:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 6, 3, padding=1)))


def of_ours() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1))
    opnorm.Normalizer(model, (3, 8, 8), K=1.0, update="differentiable")
    return model


LAYERS: dict[str, Callable[[], nn.Sequential]] = {
    "ours": of_ours,
    "torch": of_torch,
    "deel-torchlip": lambda: layer_of("deel.torchlip", "SpectralConv2d"),
    "orthogonium AOL": lambda: layer_of("orthogonium.layers.conv.AOL", "AOLConv2D"),
    "orthogonium orthogonal": lambda: layer_of("orthogonium.layers", "AdaptiveOrthoConv2d"),
    "normflows": lambda: layer_of(
        "normflows.nets.lipschitz", "InducedNormConv2d", stride=1, bias=False, n_iterations=5
    ),
}
MOVE = {"torch", "deel-torchlip", "orthogonium orthogonal"}


@pytest.mark.parametrize("name", LAYERS)
def test_whose_state_a_forward_pass_in_training_moves(name: str) -> None:
    model, x = LAYERS[name]().train(), torch.randn(2, 3, 8, 8)
    model(x)  # the first may set up what is set up once
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x)
    moved = any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert moved == (name in MOVE)


def trained(name: str, steps: range, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = LAYERS[name]()
    model.load_state_dict(state or model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "normflows"])
def test_whose_training_goes_on_from_a_state_dict_bit_by_bit(name: str) -> None:
    whole, parts = trained(name, range(6)), trained(name, range(3, 6), trained(name, range(3)))
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())


def test_a_state_dict_of_normflows_does_not_load_into_a_fresh_layer() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.u"):
        trained("normflows", range(3, 6), trained("normflows", range(3)))


@pytest.mark.parametrize("name", ["torch", "deel-torchlip", "orthogonium AOL"])
def test_whose_parametrizations_can_be_removed(name: str) -> None:
    model, x = LAYERS[name]().eval(), torch.randn(2, 3, 8, 8)
    before = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    assert not parametrize.is_parametrized(model[0])
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("stride", [1, 2])
def test_deel_torchlip_leaves_depthwise_layers_below_one(stride: int) -> None:
    torchlip = pytest.importorskip("deel.torchlip", reason="the extra bench is not installed")
    layer = torchlip.SpectralConv2d(16, 16, 3, stride=stride, padding=1, groups=16, bias=False)
    assert true_norm(layer) < 0.8


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2)])
def test_deel_torchlip_divides_by_what_torch_does_times_a_factor(kernel: int, stride: int) -> None:
    torchlip = pytest.importorskip("deel.torchlip", reason="the extra bench is not installed")
    layer = torchlip.SpectralConv2d(3, 6, kernel, stride=stride, padding=kernel // 2, bias=False, eps_bjorck=None)
    for _ in range(100):  # a reading is an iteration
        weight = layer.weight.detach()
    factor = math.ceil(kernel / stride)  # √⌈k/s⌉ for each of the two dimensions
    assert factor * float(torch.linalg.matrix_norm(weight.flatten(1), 2)) == pytest.approx(1, rel=1e-4)
    assert true_norm(layer) <= 1 + 1e-4


def test_normflows_approaches_the_norm_from_below() -> None:
    lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
    layer = lipschitz.InducedNormConv2d(3, 3, 3, stride=1, padding=1, bias=False, n_iterations=5)
    layer(torch.zeros(1, 3, 14, 14))
    geometry = ConvGeometry(3, 3, 3, (14, 14), padding=1)
    norm = float(operator_norm(ConvOperator(geometry, layer.weight.detach().double()), guarantee="exact"))
    found = []
    for _ in range(3):
        layer.compute_weight(update=True)
        found.append(float(layer.scale))
    assert all(0.5 * norm < value <= norm * (1 + 1e-5) for value in found)


@pytest.mark.parametrize("module", ["deel.torchlip", "orthogonium.layers", "normflows.nets.lipschitz"])
def test_nobody_else_has_a_layer_in_three_dimensions(module: str) -> None:
    found = dir(pytest.importorskip(module, reason="the extra bench is not installed"))
    assert any("2d" in name for name in found) and not any("3d" in name.lower() for name in found)


def test_orthogonium_multiplies_the_norms_of_groups() -> None:
    values = pytest.importorskip("orthogonium.layers.conv.singular_values", reason="the extra bench is not installed")
    layer = depthwise(16)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    product = float(values.get_conv_sv(layer, n_iter=4, return_stab_rank=False))
    largest = max(map(float, values.get_conv_sv(layer, n_iter=4, agg_groups=False, return_stab_rank=False)))
    assert product < 0.1 * true_norm(layer)
    assert true_norm(layer) <= largest * (1 + 1e-5)


def test_aol_of_orthogonium_is_a_bound_and_close() -> None:
    aol = pytest.importorskip("orthogonium.layers.conv.AOL", reason="the extra bench is not installed")
    layer = aol.AOLConv2D(16, 16, 3, padding=1, groups=16, bias=False)
    assert 0.8 < true_norm(layer) <= 1 + 1e-5


def test_normflows_drops_groups() -> None:
    lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
    layer = lipschitz.InducedNormConv2d(16, 16, 3, stride=1, padding=1, groups=16, bias=False, n_iterations=5)
    assert layer.weight.shape == (16, 16, 3, 3)


def test_normflows_keeps_the_size_of_its_first_input() -> None:
    lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
    layer = lipschitz.InducedNormConv2d(2, 2, 3, stride=1, padding=1, bias=False, n_iterations=5)
    for size in (5, 14):
        layer(torch.zeros(1, 2, size, size))
    assert layer.spatial_dims.tolist() == [5, 5]


OTHERS = {
    "deel.torchlip": [
        "SpectralLinear", "SpectralConv1d", "SpectralConv2d", "SpectralConvTranspose2d", "GroupSort", "MaxMin",
        "HouseHolder", "BatchCentering", "BatchLipNorm", "HKRLoss", "HKRMulticlassLoss", "vanilla_model",
    ],
    "orthogonium.layers": ["AdaptiveOrthoConv2d", "AdaptiveOrthoConvTranspose2d", "OrthoLinear", "BatchCentering2D"],
    "orthogonium.layers.custom_activations": ["MaxMin", "HouseHolder"],
    "orthogonium.losses": ["LossXent", "SoftHKRMulticlassLoss", "VRA"],
    "deel.torchlip.utils.evaluate_lip_const": ["evaluate_lip_const_jacobian_norm"],
}  # fmt: skip


@pytest.mark.parametrize("module", OTHERS)
def test_others_have_what_this_library_has_not(module: str) -> None:
    found = pytest.importorskip(module, reason="the extra bench is not installed")
    for name in OTHERS[module]:
        assert hasattr(found, name), name
        assert not hasattr(opnorm, name), name
