"""What docs/comparison.md says of other packages, run on those that are installed."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import ModuleType

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


@pytest.mark.parametrize("stride", [1, 2])
def test_normflows_approaches_the_norm_from_below(stride: int) -> None:
    lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
    layer = lipschitz.InducedNormConv2d(3, 3, 3, stride=stride, padding=1, bias=False, n_iterations=5)
    layer(torch.zeros(1, 3, 15, 15))
    geometry = ConvGeometry(3, 3, 3, (15, 15), padding=1, stride=stride)
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


@pytest.mark.parametrize(("stride", "least"), [(1, 0.8), (2, 0.3)])
def test_aol_of_orthogonium_is_a_bound_and_close(stride: int, least: float) -> None:
    aol = pytest.importorskip("orthogonium.layers.conv.AOL", reason="the extra bench is not installed")
    layer = aol.AOLConv2D(16, 16, 3, stride=stride, padding=1, groups=16, bias=False)
    assert least < true_norm(layer) <= 1 + 1e-5


def test_get_conv_sv_of_orthogonium_knows_the_size_where_padding_is_circular() -> None:
    values = pytest.importorskip("orthogonium.layers.conv.singular_values", reason="the extra bench is not installed")
    for mode, differ in (("circular", True), ("zeros", False)):
        layer = nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode, bias=False)
        found = {n: float(values.get_conv_sv(layer, 4, return_stab_rank=False, imsize=n)) for n in (5, 14)}
        assert (found[5] != found[14]) == differ
        assert true_norm(layer, 5) <= found[5] * (1 + 1e-5)


@pytest.mark.parametrize("size", [14, 15])
def test_normflows_takes_stride_2_on_odd_sizes_alone(size: int) -> None:
    lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
    layer = lipschitz.InducedNormConv2d(3, 3, 3, stride=2, padding=1, bias=False, n_iterations=5)
    if size % 2:
        assert layer(torch.zeros(1, 3, size, size)).shape == (1, 3, 8, 8)
    else:
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            layer(torch.zeros(1, 3, size, size))


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


class TestModels:
    """What others do with a model that is there already."""

    def test_torch_takes_layers_and_we_take_the_model(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
        with pytest.raises(ValueError, match="has no parameter"):
            nn.utils.parametrizations.spectral_norm(model)
        opnorm.Normalizer(model, (3, 8, 8), K=1.0).remove()
        norms = [float(operator_norm(layer)) for layer in opnorm.operators_of(model, (3, 8, 8)).values()]
        assert len(norms) == 2 and all(0.9 < norm <= 1.01 for norm in norms)

    def test_others_bring_their_own_layers(self) -> None:
        for name, layers in LAYERS.items():
            package = name.partition(" ")[0].removesuffix("-torchlip")
            if name in ("ours", "torch"):
                continue
            assert any(kind.__module__.startswith(package) for kind in type(layers()[0]).__mro__), name

    def test_deel_torchlip_takes_a_plain_layer_too(self) -> None:
        utils = pytest.importorskip("deel.torchlip.utils", reason="the extra bench is not installed")
        layer = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        utils.lconv_norm(nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=100))
        assert 0.3 < true_norm(layer) <= 1 + 1e-4

    def test_one_call_of_normflows_normalises_a_model(self) -> None:
        flows = pytest.importorskip("normflows", reason="the extra bench is not installed")
        model = of_normflows(flows)
        flows.utils.update_lipschitz(model, 200)
        for layer in normed(model):
            weight = layer.compute_weight(update=False)
            assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(0.97, rel=1e-3)


def of_normflows(flows: ModuleType) -> nn.Module:
    """A network whose layers have norms above their cap, since they were multiplied by ten."""
    model = flows.nets.LipschitzMLP([4, 16, 4], init_zeros=False)
    with torch.no_grad():
        for layer in normed(model):
            layer.weight.mul_(10)
    return model


def normed(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if hasattr(layer, "compute_weight")]


class TestFactors:
    """A norm other than 1."""

    def test_torch_has_no_argument_for_it(self) -> None:
        known = {"module", "name", "n_power_iterations", "eps", "dim"}
        assert inspect.signature(nn.utils.parametrizations.spectral_norm).parameters.keys() == known

    def test_orthogonium_has_no_argument_for_it(self) -> None:
        layers = pytest.importorskip("orthogonium.layers", reason="the extra bench is not installed")
        aol = pytest.importorskip("orthogonium.layers.conv.AOL", reason="the extra bench is not installed")
        known = {*inspect.signature(nn.Conv2d).parameters, *inspect.signature(nn.Linear).parameters}
        for layer in (aol.AOLConv2D, layers.AdaptiveOrthoConv2d, layers.OrthoLinear):
            assert inspect.signature(layer).parameters.keys() <= known | {"niter", "ortho_params"}

    def test_deel_torchlip_has_one_for_layers_and_that_of_a_sequential_leaves_them(self) -> None:
        torchlip = pytest.importorskip("deel.torchlip", reason="the extra bench is not installed")
        alone, whole = torchlip.SpectralLinear(5, 4, k_coef_lip=3.0), torchlip.SpectralLinear(5, 4)
        torchlip.Sequential(whole, k_coef_lip=3.0)
        norms = [float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) for layer in (alone, whole)]
        assert norms == pytest.approx([3, 1], rel=1e-4)

    def test_that_of_normflows_is_a_cap(self) -> None:
        lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
        for scale, capped in ((0.01, False), (10, True)):
            layer = lipschitz.InducedNormLinear(5, 4, coeff=2.0, n_iterations=200)
            with torch.no_grad():
                layer.weight.mul_(scale)
            weight = layer.compute_weight()
            assert torch.equal(weight, layer.weight) != capped
            assert not capped or float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(2, rel=1e-4)


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The norm of the Jacobian at x, below every Lipschitz constant."""
    jacobian = torch.autograd.functional.jacobian(function, x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


class TestNetworks:
    """What others say of a whole network."""

    @pytest.mark.parametrize("package", ["deel-torchlip", "orthogonium AOL", "orthogonium orthogonal"])
    def test_those_of_their_layers_have_constant_1_which_certify_finds(self, package: str) -> None:
        torchlip = pytest.importorskip("deel.torchlip", reason="the extra bench is not installed")
        layers = pytest.importorskip("orthogonium.layers", reason="the extra bench is not installed")
        if package == "deel-torchlip":
            rest = [torchlip.GroupSort2(), nn.Flatten(), torchlip.SpectralLinear(6 * 64, 10)]
        else:
            rest = [layers.MaxMin(), nn.Flatten(), layers.OrthoLinear(6 * 64, 10)]
        model = nn.Sequential(LAYERS[package]()[0], *rest)
        model(torch.randn(2, 3, 8, 8))
        certificate = opnorm.certify(torchlip.vanilla_model(model, in_place=False), (3, 8, 8))
        assert 0.1 < certificate.lower <= certificate.bound <= 1 + 1e-4

    def test_that_of_normflows_has_a_constant_below_1(self) -> None:
        flows = pytest.importorskip("normflows", reason="the extra bench is not installed")
        lipschitz = pytest.importorskip("normflows.nets.lipschitz", reason="the extra bench is not installed")
        steepest = max(slope(lipschitz.Swish(), x) for x in torch.linspace(-10, 10, 201)[:, None])
        assert 0.9 < steepest <= 1
        kinds = {type(layer).__name__ for layer in flows.nets.LipschitzMLP([4, 16, 4]).net}
        assert kinds == {"Swish", "InducedNormLinear"}  # the latter keep to 0.97, as TestModels tests

    def test_residuals_of_orthogonium_keep_1(self) -> None:
        residual = pytest.importorskip("orthogonium.layers.residual", reason="the extra bench is not installed")
        sizes = {"ConcatResidual": 3, "L2NormResidual": 6, "AdditiveResidual": 6, "PrescaledAdditiveResidual": 6}
        for name, size in sizes.items():
            block = getattr(residual, name)(nn.utils.parametrizations.orthogonal(nn.Linear(size, size)))
            found = [slope(block, x) for x in torch.randn(10, 1, 6)]
            assert 0.5 < max(found) <= 1 + 1e-5, name

    def test_residuals_and_pooling_of_deel_torchlip_keep_1(self) -> None:
        torchlip = pytest.importorskip("deel.torchlip", reason="the extra bench is not installed")
        blocks: list[Callable[[Tensor], Tensor]] = [torchlip.ScaledAvgPool2d(2), torchlip.ScaledL2NormPool2d(2)]
        mix, matrix = torchlip.LipResidual(), torch.linalg.qr(torch.randn(4, 4)).Q
        for block in (*blocks, lambda x: mix(x, x @ matrix)):
            found = [slope(block, x) for x in torch.randn(10, 1, 1, 4, 4)]
            assert 0.5 < max(found) <= 1 + 1e-5

    def test_residual_flows_of_normflows_are_invertible(self) -> None:
        flows = pytest.importorskip("normflows", reason="the extra bench is not installed")
        model, x = of_normflows(flows), torch.randn(5, 4)
        flows.utils.update_lipschitz(model, 200)
        block = flows.flows.Residual(model, reverse=False).eval()
        torch.testing.assert_close(block.inverse(block(x)[0])[0], x, rtol=0, atol=1e-3)

    def test_vra_of_orthogonium_is_our_radius_and_needs_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = pytest.importorskip("orthogonium.losses", reason="the extra bench is not installed")
        model, x = nn.Sequential(nn.Linear(5, 4)), torch.randn(3, 5)
        certificate, logits = opnorm.certify(model, (5,)), model(x)
        if not torch.cuda.is_available():
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
                losses.VRA(logits, logits.argmax(1))
        monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor)
        found = losses.VRA(logits, logits.argmax(1), "global", L=certificate.bound, return_certs=True)
        torch.testing.assert_close(found, certificate.radius(logits).to(found), rtol=1e-5, atol=0)


def test_torch_reshapes_kernels_of_all_kinds() -> None:
    kinds = [nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    for kind in kinds:
        layer = nn.utils.parametrizations.spectral_norm(kind(3, 4, 3), n_power_iterations=50)
        weight = layer.weight.transpose(0, 1) if "Transpose" in kind.__name__ else layer.weight
        norm = float(torch.linalg.matrix_norm(weight.detach().flatten(1), 2))
        assert norm == pytest.approx(1, rel=1e-3), kind


def test_torch_has_orthogonal_matrices() -> None:
    weight = nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)).weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(3))
