"""`opnorm.models`: the published architectures, their names, their scale at the start, and all that torch does."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jacrev, vmap

import opnorm
from opnorm import models
from opnorm.models.init import keep_mean_square_
from opnorm.models.resnet import ResidualBlock

SHAPES = {"ds_convnet": (1, 8, 8), "ds_resnet34": (3, 32, 32), "mobilenet_v2": (3, 64, 64)}
THIN = {"ds_convnet": {"width": 8}, "ds_resnet34": {"width": 8}, "mobilenet_v2": {"width_mult": 0.35}}
NAMES = sorted(models.MODELS)

# Which ImageNet classes are what CIFAR-10 calls aeroplane, car, bird, cat, deer, dog, frog, horse, ship, lorry.
CIFAR_IN_IMAGENET = (
    [404, 895],
    [436, 468, 479, 511, 581, 609, 627, 656, 661, 717, 751, 817],
    [*range(7, 25), *range(80, 101), *range(127, 147)],
    [*range(281, 286)],
    [*range(344, 354)],
    [*range(151, 269)],
    [30, 31, 32],
    [339],
    [403, 472, 484, 510, 554, 576, 625, 628, 724, 780, 814, 833, 871, 914],
    [555, 569, 654, 656, 675, 717, 864, 867],
)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def thin(name: str) -> nn.Module:
    """A narrow one of each, so that tests are quick."""
    return models.build(name, num_classes=7, **THIN[name])


@pytest.fixture
def images(name: str) -> Tensor:
    return torch.randn(5, *SHAPES[name])


@pytest.fixture(scope="module")
def folded(data_dir: Path) -> dict[str, Tensor]:
    """The parameters of a trained MobileNetV2, numbered in the order of execution."""
    path = data_dir / "weights" / "mobilenetv2_torchvision_bnfolded.safetensors"
    if not path.exists():
        pytest.skip(f"no {path.name} among the data")
    return pytest.importorskip("safetensors.torch").load_file(path)


def layers(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


# --- the registry -----------------------------------------------------------------------------------------------------


def test_build_passes_its_arguments_on(name: str, thin: nn.Module, images: Tensor) -> None:
    assert thin(images).shape == (5, 7)
    assert parameters(thin) < parameters(models.build(name, num_classes=7))


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="expected a model among ds_convnet, ds_resnet34, mobilenet_v2, got 'resnet'"):
        models.build("resnet")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.ds_resnet34(num_classes=0), "num_classes as an integer of at least 1, got 0"),
        (lambda: models.ds_resnet34(width=2.5), "width as an integer of at least 1, got 2.5"),
        (lambda: models.ds_resnet34(residual_weight=1.5), "residual_weight between 0 and 1"),
        (lambda: models.ds_resnet34(residual_weight=0.0), "residual_weight between 0 and 1"),
        (lambda: models.ds_convnet(depth=0), "depth as an integer of at least 1, got 0"),
        (lambda: models.mobilenet_v2(in_channels=True), "in_channels as an integer of at least 1, got True"),
        (lambda: models.mobilenet_v2(width_mult=-1.0), "width_mult > 0, got -1.0"),
        (lambda: models.mobilenet_v2(width_mult=math.nan), "width_mult > 0, got nan"),
        (lambda: models.SeparableConv2d(3, 5, 4), "odd kernel_size, got 4"),
    ],
)
def test_bad_arguments_are_refused(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# --- the separable layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "multiplier", "kernel"), [(1, 1, 3), (2, 1, 3), (1, 5, 3), (2, 2, 5)])
def test_a_separable_layer_is_one_dense_convolution(stride: int, multiplier: int, kernel: int) -> None:
    layer = models.SeparableConv2d(3, 7, kernel, stride, multiplier=multiplier).double()
    nn.init.normal_(layer.pointwise.bias)
    matrix = layer.pointwise.weight.flatten(1).unflatten(1, (3, multiplier))
    dense = torch.einsum("ocm,cmhw->ochw", matrix, layer.depthwise.weight.unflatten(0, (3, multiplier)).squeeze(2))
    x = torch.randn(2, 3, 11, 13, dtype=torch.float64)
    expected = F.conv2d(x, dense, layer.pointwise.bias, stride, kernel // 2)
    torch.testing.assert_close(layer(x), expected)
    assert expected.shape[2:] == (-(-11 // stride), -(-13 // stride))


def test_only_the_pointwise_part_has_a_bias() -> None:
    layer = models.SeparableConv2d(3, 7)
    assert layer.depthwise.bias is None and layer.pointwise.bias is not None


# --- ds_resnet34 ------------------------------------------------------------------------------------------------------


def test_ds_resnet34_has_the_layers_that_the_paper_counts() -> None:
    model = models.ds_resnet34()
    separable = layers(model, models.SeparableConv2d)
    assert len(separable) == 33
    assert [i for i, layer in enumerate(separable) if layer.depthwise.stride == (2, 2)] == [7, 15, 27]
    assert len(layers(model, nn.Conv2d)) == 66 and len(layers(model, nn.Linear)) == 1
    assert not layers(model, nn.BatchNorm2d)
    assert all(layer.pointwise.stride == (1, 1) for layer in separable)


def test_ds_resnet34_has_the_parameters_of_its_table() -> None:
    widths = [3, 64] + [64] * 6 + [128] * 8 + [256] * 12 + [512] * 6
    convolutions = sum(9 * a + a * b + b for a, b in itertools.pairwise(widths))
    assert parameters(models.ds_resnet34()) == convolutions + 512 * 10 + 10 == 2_419_813


def test_ds_resnet34_works_on_32_16_8_and_4_pixels() -> None:
    operators = opnorm.operators_of(models.ds_resnet34(width=2), (3, 32, 32))
    sizes = [operator.geometry.input_size[0] for name, operator in operators.items() if name.endswith("depthwise")]
    assert sizes == [32] * 8 + [16] * 8 + [8] * 12 + [4] * 5
    assert {o.geometry.kind for name, o in operators.items() if name.endswith("depthwise")} == {"depthwise"}
    assert {o.geometry.kind for name, o in operators.items() if name.endswith("pointwise")} == {"pointwise"}


def block(stride: int, residual_weight: float | None) -> tuple[ResidualBlock, tuple[int, ...]]:
    made = ResidualBlock(3, 3 * stride, stride, gain=1.0, residual_weight=residual_weight)
    return made.double(), (3, 7, 7)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_shortcut_has_norm_one(stride: int) -> None:
    made, shape = block(stride, None)
    jacobian = jacrev(made.shortcut)(torch.randn(1, *shape, dtype=torch.float64))
    singular = torch.linalg.svdvals(jacobian.reshape(-1, math.prod(shape)))
    torch.testing.assert_close(singular[0], torch.ones_like(singular[0]))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("residual_weight", [None, 0.3])
def test_an_addition_costs_what_the_block_says(stride: int, residual_weight: float | None) -> None:
    """The bound holds for every Jacobian."""
    made, shape = block(stride, residual_weight)
    norms = math.prod(opnorm.operator_norm(o).value.item() for o in opnorm.operators_of(made, shape).values())
    bound = 1 + norms if residual_weight is None else 1 - residual_weight + residual_weight * norms
    points = torch.randn(11, 1, *shape, dtype=torch.float64)
    jacobians = vmap(jacrev(made))(points).reshape(11, -1, math.prod(shape))
    assert torch.linalg.matrix_norm(jacobians, 2).max() <= bound * (1 + 1e-9)


@pytest.mark.parametrize(("residual_weight", "cost"), [(None, 2.0), (0.3, 1.0)])
def test_an_addition_costs_no_less(residual_weight: float | None, cost: float) -> None:
    made, shape = block(1, residual_weight)
    for layer in (made.conv1, made.conv2):
        nn.init.dirac_(layer.depthwise.weight, groups=3)
        nn.init.dirac_(layer.pointwise.weight)
    x = torch.rand(1, *shape, dtype=torch.float64) + 1.0  # positive, so that every ReLU is the identity
    jacobian = jacrev(made)(x).reshape(-1, math.prod(shape))
    assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(cost)


def test_a_residual_weight_leaves_the_parameters_alone() -> None:
    plain, weighted = models.ds_resnet34(width=2), models.ds_resnet34(width=2, residual_weight=1 / 16)
    weighted.load_state_dict(plain.state_dict())
    x = torch.randn(3, 3, 32, 32)
    assert not torch.allclose(plain(x), weighted(x))


# --- mobilenet_v2 -----------------------------------------------------------------------------------------------------


def test_mobilenet_v2_has_the_published_number_of_parameters() -> None:
    """3,504,872 with batch norm; without, each of 17,056 channels has a bias instead of a scale and a shift."""
    with torch.device("meta"):
        normed, plain = models.mobilenet_v2(batch_norm=True), models.mobilenet_v2()
    channels = sum(layer.out_channels for layer in layers(plain, nn.Conv2d))
    assert channels == sum(layer.num_features for layer in layers(normed, nn.BatchNorm2d)) == 17_056
    assert parameters(normed) == 3_504_872
    assert parameters(plain) == 3_504_872 - 2 * channels + channels == 3_487_816
    assert not layers(plain, nn.BatchNorm2d)
    assert all(layer.bias is None for layer in layers(normed, nn.Conv2d))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_mobilenet_v2_filters_on_the_published_sizes(batch_norm: bool) -> None:
    with torch.device("meta"):
        model = models.mobilenet_v2(batch_norm=batch_norm)
        seen = []
        for layer in layers(model, nn.Conv2d):
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append((layer, inputs[0].shape[2])))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    depthwise = [(layer, size) for layer, size in seen if layer.groups == layer.in_channels]
    assert len(seen) == 52 and len(depthwise) == 17
    assert [layer.stride[0] for layer, _ in depthwise] == [1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1]
    assert [size for _, size in depthwise] == [112] * 2 + [56] * 2 + [28] * 3 + [14] * 7 + [7] * 3


@pytest.mark.parametrize(
    ("width_mult", "widths"),
    [
        (0.35, [16, 8, 8, 16, 24, 32, 56, 112, 1280]),
        (0.75, [24, 16, 24, 24, 48, 72, 120, 240, 1280]),
        (1.4, [48, 24, 32, 48, 88, 136, 224, 448, 1792]),
    ],
)
def test_widths_are_rounded_as_published(width_mult: float, widths: list[int]) -> None:
    with torch.device("meta"):
        model = models.mobilenet_v2(width_mult=width_mult)
    ends = [layers(model.features[i], nn.Conv2d)[-1].out_channels for i in (0, 1, 2, 4, 7, 11, 14, 17, 18)]
    assert ends == widths


def test_names_are_those_of_torchvision() -> None:
    with torch.device("meta"):
        normed, plain = models.mobilenet_v2(batch_norm=True).state_dict(), models.mobilenet_v2().state_dict()
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

    def unit(convolution: str, batch_norm: str) -> list[str]:
        return [f"features.{convolution}.weight", *(f"features.{batch_norm}.{k}" for k in norm)]

    expected = unit("0.0", "0.1") + unit("1.conv.0.0", "1.conv.0.1") + unit("1.conv.1", "1.conv.2")
    for i in range(2, 18):
        for j in range(2):
            expected += unit(f"{i}.conv.{j}.0", f"{i}.conv.{j}.1")
        expected += unit(f"{i}.conv.2", f"{i}.conv.3")
    expected += [*unit("18.0", "18.1"), "classifier.1.weight", "classifier.1.bias"]
    assert list(normed) == expected
    convolutions = [key for key in expected if normed[key].dim() == 4]
    biases = [key.replace("weight", "bias") for key in convolutions]
    assert set(plain) == {*convolutions, *biases, "classifier.1.weight", "classifier.1.bias"}


def test_batch_norm_folds_into_the_network_without_it() -> None:
    normed = models.mobilenet_v2(11, 0.35, batch_norm=True).double().eval()
    for layer in layers(normed, nn.BatchNorm2d):
        for tensor in (layer.weight, layer.running_var):
            nn.init.uniform_(tensor, 0.5, 2.0)
        for tensor in (layer.bias, layer.running_mean):
            nn.init.normal_(tensor)
    modules = [(n, m) for n, m in normed.named_modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    folded = {key: value for key, value in normed.state_dict().items() if key.startswith("classifier")}
    for (key, conv), (_, norm) in zip(modules[::2], modules[1::2], strict=True):
        fused = nn.utils.fuse_conv_bn_eval(conv.eval(), norm.eval())
        folded |= {f"{key}.{kind}": value for kind, value in fused.state_dict().items()}
    plain = models.mobilenet_v2(11, 0.35).double()
    plain.load_state_dict(folded, strict=True)
    x = torch.randn(3, 3, 67, 71, dtype=torch.float64)
    torch.testing.assert_close(plain(x), normed(x))


def functional_mobilenet(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """MobileNetV2 from the bare tensors of the folded checkpoint: what a layer is can be read off its shape."""
    strides = iter([1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1])
    keys = sorted(key for key in tensors if ".conv_" in key and key.endswith("weight"))
    start = None  # the input of the block, while one is open
    for key in keys:
        weight = tensors[key]
        bias = next(t for k, t in tensors.items() if k.endswith(key.split(".")[1] + ".bias"))
        out, fan, kernel, _ = weight.shape
        if key == keys[0]:
            x = F.conv2d(x, weight, bias, 2, 1).clamp(0, 6)
        elif kernel == 3:
            x = F.conv2d(x, weight, bias, next(strides), 1, groups=out).clamp(0, 6)
        elif fan < out or key == keys[-1]:  # expand, and the last
            start = x
            x = F.conv2d(x, weight, bias).clamp(0, 6)
        else:  # project
            x = F.conv2d(x, weight, bias)
            x = x + start if start is not None and start.shape == x.shape else x
    return x.mean((2, 3)) @ tensors["0104.fc.weight"].T + tensors["0105.fc.bias"]


@pytest.mark.parametrize("size", [96, 131])
def test_the_folded_weights_load_and_give_the_logits_of_an_independent_forward(
    folded: dict[str, Tensor], size: int
) -> None:
    model = models.mobilenet_v2()
    model.load_state_dict(folded, strict=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    expected = functional_mobilenet({key: value.double() for key, value in folded.items()}, x)
    assert expected.std() > 0.5  # not a network that says nothing
    torch.testing.assert_close(model.double()(x), expected)


def test_the_folded_weights_load_inside_another_model(folded: dict[str, Tensor]) -> None:
    pair = nn.ModuleDict({"first": models.mobilenet_v2(), "second": nn.Linear(2, 3)})
    pair.load_state_dict(
        {f"first.{k}": v for k, v in folded.items()}
        | {f"second.{k}": v for k, v in nn.Linear(2, 3).state_dict().items()}
    )
    torch.testing.assert_close(pair["first"].features[0][0].weight.data, folded["0000.conv_0.weight"])


def test_numbered_parameters_that_do_not_fit_are_refused(folded: dict[str, Tensor]) -> None:
    model = models.mobilenet_v2()
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*features\.0\.0\.weight.*Unexpected key.*0000\.conv_0"):
        model.load_state_dict({key: value for key, value in folded.items() if "fc" not in key})
    with pytest.raises(RuntimeError, match=r"size mismatch for classifier\.1\.weight"):
        models.mobilenet_v2(10).load_state_dict(folded)


def test_a_state_dict_of_its_own_is_loaded_as_it_is() -> None:
    first, second = models.mobilenet_v2(5, 0.35), models.mobilenet_v2(5, 0.35)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)


def test_the_folded_weights_tell_the_classes_of_cifar(folded: dict[str, Tensor], data_dir: Path) -> None:
    """Enlarged 32×32 images are hard for a network of photographs, but it is right far more often than 1 in 10."""
    path = data_dir / "cifar-10-batches-bin" / "test_batch.bin"
    if not path.exists():
        pytest.skip(f"no {path.name} among the data")
    records = torch.frombuffer(bytearray(path.read_bytes()[: 100 * 3073]), dtype=torch.uint8).reshape(100, 3073)
    pixels = F.interpolate(records[:, 1:].reshape(100, 3, 32, 32) / 255, size=128, mode="bicubic").clamp(0, 1)
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    model = models.mobilenet_v2()
    model.load_state_dict(folded)
    with torch.no_grad():
        logits = model((pixels - mean) / deviation)
    scores = torch.stack([logits[:, classes].amax(1) for classes in CIFAR_IN_IMAGENET], 1)
    assert (scores.argmax(1) == records[:, 0]).double().mean() > 0.5


# --- scale at the start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(53, 20011), nn.Conv2d(23, 4001, 3, stride=2), nn.Conv2d(1, 20011, (3, 5))],
    ids=["linear", "strided", "depthwise"],
)
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_a_layer_multiplies_the_mean_square_by_the_square_of_its_gain(layer: nn.Module, gain: float) -> None:
    """Whatever the mean of the signal and its correlations: here its entries are positive and nearly constant."""
    keep_mean_square_(layer.double(), gain)
    shape = (1, layer.in_features) if isinstance(layer, nn.Linear) else (1, layer.in_channels, 3, 5)
    x = 2.0 + 0.3 * torch.randn(shape, dtype=torch.float64)
    seen = x[..., :3] if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2) else x
    out = layer(x)[..., :1] if x.dim() == 4 else layer(x)
    assert root_mean_square(out) == pytest.approx(gain * root_mean_square(seen), rel=0.04)
    assert not layer.bias.any()


def scales(model: nn.Module, x: Tensor, blocks: list[nn.Module]) -> list[float]:
    """Root mean square after each block."""
    seen: list[float] = []
    hooks = [b.register_forward_hook(lambda module, inputs, out: seen.append(root_mean_square(out))) for b in blocks]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_ds_resnet34_keeps_the_scale_through_its_16_blocks() -> None:
    model = models.ds_resnet34(width=32)
    seen = scales(model, torch.randn(5, 3, 32, 32), layers(model, ResidualBlock))
    assert len(seen) == 16
    assert max(seen) / min(seen) < 2
    assert 0.5 < seen[-1] < 2


@pytest.mark.parametrize(("size", "factor"), [(0.01, 3), (1.0, 8)], ids=["linear", "clipped"])
def test_mobilenet_v2_keeps_the_scale_through_its_19_blocks(size: float, factor: float) -> None:
    """A small signal never reaches the 6 of ReLU6; one of size 1 loses what is clipped, hence the wider margin."""
    model = models.mobilenet_v2()
    seen = scales(model, size * torch.randn(2, 3, 160, 160), list(model.features))
    assert len(seen) == 19
    assert max(seen) / min(seen) < factor


def test_ds_resnet34_keeps_the_scale_at_the_norm_that_suits_the_paper() -> None:
    """K = 5 for each separable layer, √5 for each of its parts: the claim of `opnorm.models.init`."""
    model = models.ds_resnet34()
    for operator in opnorm.operators_of(model, (3, 32, 32)).values():
        share = 5.0 if operator.geometry.kind == "linear" else math.sqrt(5.0)
        operator.weight.data *= share / opnorm.operator_norm(operator).value.item()
    x = torch.randn(5, 3, 32, 32)
    seen = scales(model, x, layers(model, ResidualBlock))
    assert max(seen) / min(seen) < 3
    assert 0.2 < root_mean_square(model(x)) < 5


def test_no_layer_starts_at_zero(thin: nn.Module) -> None:
    """A layer of zeros cannot be divided by its norm."""
    assert all(m.weight.flatten(1).norm(dim=1).min() > 0 for m in layers(thin, (nn.Conv2d, nn.Linear)))


def test_a_few_steps_reduce_the_loss(thin: nn.Module, images: Tensor) -> None:
    labels = torch.arange(5)
    optimizer = torch.optim.SGD(thin.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(thin(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_every_parameter_gets_a_gradient(thin: nn.Module, images: Tensor) -> None:
    F.cross_entropy(thin(images), torch.arange(5)).backward()
    assert [key for key, p in thin.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_ds_convnet_learns_the_digits() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1347], order[1347:]
    model = models.ds_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(64):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (model(x[test]).argmax(1) == y[test]).double().mean() >= 0.95


# --- plain torch ------------------------------------------------------------------------------------------------------


def test_training_and_evaluation_compute_the_same(thin: nn.Module, images: Tensor) -> None:
    assert thin.training
    trained = thin(images)
    torch.testing.assert_close(thin.eval()(images), trained, rtol=0, atol=0)


def test_dropout_is_there_when_asked_for() -> None:
    model, x = models.mobilenet_v2(7, 0.35, dropout=0.5), torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    assert "classifier.1.weight" in model.state_dict()


def test_the_seed_decides_the_weights(name: str) -> None:
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(models.build(name, **THIN[name]).state_dict())
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert any(not torch.equal(made[0][key], made[2][key]) for key in made[0])


def test_channels_last_computes_the_same_and_stays(thin: nn.Module, images: Tensor) -> None:
    expected = thin(images)
    convolutions = layers(thin, nn.Conv2d)
    last: list[bool] = []
    for layer in convolutions:
        layer.register_forward_hook(
            lambda layer, inputs, out: last.append(out.is_contiguous(memory_format=torch.channels_last))
        )
    thin.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        thin(images.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-4
    )
    assert len(last) == len(convolutions) and all(last)


def test_it_is_one_graph_for_the_compiler(thin: nn.Module, images: Tensor) -> None:
    compiled = torch.compile(thin, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), thin(images))


def test_it_exports_with_any_batch_size(thin: nn.Module, images: Tensor) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(thin.eval(), (images,), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(exported(images[:3]), thin(images[:3]))


def test_a_copy_is_independent_and_equal(thin: nn.Module, images: Tensor) -> None:
    copied = copy.deepcopy(thin)
    torch.testing.assert_close(copied(images), thin(images), rtol=0, atol=0)
    nn.init.zeros_(next(copied.parameters()))
    copied.load_state_dict(thin.state_dict())
    torch.testing.assert_close(copied(images), thin(images), rtol=0, atol=0)


def test_every_layer_has_a_norm(name: str, thin: nn.Module) -> None:
    operators = opnorm.operators_of(thin, SHAPES[name])
    assert len(operators) == len(layers(thin, (nn.Conv2d, nn.Linear)))
    assert all(opnorm.operator_norm(o, guarantee="upper").value > 0 for o in operators.values())
