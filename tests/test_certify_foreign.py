"""Networks written by others, as they are: certified, or refused with all reasons at once."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import opnorm
import opnorm.models

# --- hand-written networks


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 and 34 (He et al. 2015), batch norm included."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet34(nn.Module):
    def __init__(self, width: int = 4, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers, inputs = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                layers.append(BasicBlock(inputs, width << stage, 2 if stage and not block else 1))
                inputs = width << stage
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.stem(x))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv3d(outputs, outputs, 3, padding=1),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet3d(nn.Module):
    """A 3-D U-Net (Çiçek et al. 2016)."""

    def __init__(self, width: int = 4, classes: int = 2, transposed: bool = True):
        super().__init__()
        self.down = nn.ModuleList(
            [double_conv(1, width), double_conv(width, 2 * width), double_conv(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(c, c // 2, 2, 2)
            if transposed
            else nn.Sequential(nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(c, c // 2, 1))
            for c in (4 * width, 2 * width)
        )
        self.merge = nn.ModuleList([double_conv(4 * width, 2 * width), double_conv(2 * width, width)])
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool3d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def dcgan_discriminator(width: int = 8) -> nn.Module:
    """Radford et al. 2015."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for i in range(3):
        layers += [
            nn.Conv2d(width << i, width << (i + 1), 4, 2, 1, bias=False),
            nn.BatchNorm2d(width << (i + 1)),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(width << 3, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten())


def dcgan_generator(width: int = 8) -> nn.Module:
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(20, width << 2, 4, 1, 0, bias=False),
        nn.BatchNorm2d(width << 2),
        nn.ReLU(True),
    ]
    for i in (2, 1):
        layers += [
            nn.ConvTranspose2d(width << i, width << (i - 1), 4, 2, 1, bias=False),
            nn.BatchNorm2d(width << (i - 1)),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022 with linear layers on the last dimension and layer scale, but without layer norm."""

    def __init__(self, channels: int):
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.pwconv1, self.act, self.pwconv2 = (
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )
        self.gamma = nn.Parameter(0.1 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class DenseNet(nn.Module):
    """Densely connected layers with concatenation (Huang et al. 2017)."""

    def __init__(self, channels: int = 6, growth: int = 4, count: int = 4):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth),
                nn.ReLU(),
                nn.Conv2d(channels + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(count)
        )
        self.norm, self.head = nn.BatchNorm2d(channels + count * growth), nn.Linear(channels + count * growth, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(nn.functional.relu(self.norm(x)).mean([2, 3]))


class ShuffleUnit(nn.Module):
    """ShuffleNet v2 (Ma et al. 2018): split, transform one half, concatenate, shuffle."""

    def __init__(self, channels: int):
        super().__init__()
        c = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(c, c, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, c, 3, 1, 1, groups=c, bias=False),
            nn.BatchNorm2d(c),
            nn.Conv2d(c, c, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        y = torch.cat((first, self.branch(second)), dim=1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


HAND_WRITTEN = {
    "resnet34": (lambda: ResNet34(), (3, 64, 64)),
    "unet3d": (lambda: UNet3d(), (1, 8, 12, 8)),
    "unet3d, trilinear": (lambda: UNet3d(transposed=False), (1, 8, 8, 8)),
    "dcgan discriminator": (dcgan_discriminator, (3, 64, 64)),
    "dcgan generator": (dcgan_generator, (20, 1, 1)),
    "convnext blocks": (lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8)), (3, 48, 40)),
    "densenet": (DenseNet, (3, 16, 16)),
    "shufflenet": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), ShuffleUnit(16), ShuffleUnit(16)), (3, 24, 24)),
    "mobilenet_v2": (lambda: opnorm.models.mobilenet_v2(width_mult=0.35), (3, 64, 64)),
    "mobilenet_v2 with batch norm": (lambda: opnorm.models.mobilenet_v2(width_mult=0.35, batch_norm=True), (3, 64, 64)),
    "spectral norm": (
        lambda: nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3)), nn.Tanh()),
        (8,),
    ),
}

# --- networks of the transformers library, from configurations, random weights

SMALL = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
CERTIFIED = {
    "MobileNetV1ForImageClassification": {"image_size": 64, "depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"image_size": 64, "depth_multiplier": 0.35},
    "ResNetForImageClassification": SMALL,
    "ResNetBackbone": SMALL | {"layer_type": "basic", "out_features": ["stage2", "stage4"]},
    "RegNetForImageClassification": SMALL | {"layer_type": "x", "groups_width": 8},
    "RTDetrResNetBackbone": SMALL,
}
REFUSED = {
    "ConvNextForImageClassification": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, ("layer_norm",)),
    "ViTForImageClassification": (
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 64,
        },
        ("layer_norm", "attention"),
    ),
    "SegformerForSemanticSegmentation": (
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
        ("layer_norm", "attention"),
    ),
    "RegNetForImageClassification": (SMALL | {"layer_type": "y", "groups_width": 8}, ("mul", "product of two")),
    "PoolFormerForImageClassification": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, ("group_norm",)),
}


def settle(model: nn.Module) -> nn.Module:
    """Batch norms as after training, not as the identity."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.uniform_(0.5, 2)
            with torch.no_grad():
                module.weight.uniform_(0.5, 2)
    return model.eval()


def certified(model: nn.Module, shape: tuple[int, ...]) -> None:
    certificate = opnorm.certify(settle(model), shape, inputs=1, iterations=8, ascent=2)
    assert all(r.guarantee in ("exact", "upper") for r in certificate.layers)
    assert 0 < certificate.lower <= certificate.bound * (1 + 1e-9)
    assert certificate.bound <= certificate.product < math.inf
    names = dict(model.named_modules())
    assert all(row.name in names or row.name == row.op for row in certificate.layers)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_network_is_certified(name, device):
    build, shape = HAND_WRITTEN[name]
    certified(build().to(device), shape)


def built(name: str, settings: dict) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        cls = getattr(transformers, name, None)
        if cls is None:
            pytest.skip(f"this version of transformers has no {name}")
        return cls(cls.config_class(**settings))


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_network_of_transformers_is_certified(name, device):
    certified(built(name, CERTIFIED[name]).to(device), (3, 64, 64))


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_of_transformers_is_refused_with_all_reasons(name):
    settings, reasons = REFUSED[name]
    with pytest.raises(ValueError, match="without one") as error:
        opnorm.certify(built(name, settings), (3, 64, 64))
    text = str(error.value)
    assert all(reason in text for reason in reasons)
    assert "\n    at " in text and "lipschitz_rule" in text
