"""Random small networks for certificates: sums, joins, strides, pooling, batch norm, transposed; 1-D to 3-D."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {1: (5, 7, 11, 13), 2: (3, 4, 5, 7), 3: (2, 3, 4)}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_T = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
AVERAGE = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
MAXIMUM = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
ADAPTIVE_MAX = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}
ACTIVATIONS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.PReLU,
    nn.Softshrink,
    nn.LogSigmoid,
)
LINEAR = (
    "dense",
    "depthwise",
    "grouped",
    "multiplier",
    "pointwise",
    "separable",
    "norm",
    "average",
    "transposed",
    "scale",
    "pad",
    "resize",
    "shuffle",
    "flip",
    "last",
    "adaptive",
)
NONLINEAR = (
    "activation",
    "activation",
    "maximum",
    "maxmin",
    "sort",
    "softmax",
    "adaptive_maximum",
    "extremum",
    "where",
)
JOINS = ("residual", "difference", "concat", "split", "inception", "mixed")


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function, name: str = ""):
        super().__init__()
        self.function, self.name = function, name
        self.register_buffer("unit", torch.ones(()))  # follows .double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class Join(nn.Module):
    """Branches of one input, put together."""

    def __init__(self, kind: str, *branches: nn.Module):
        super().__init__()
        self.kind, self.branches = kind, nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "split":
            return torch.cat([b(p) for b, p in zip(self.branches, x.chunk(2, 1), strict=True)], 1)
        results = [b(x) for b in self.branches]
        if self.kind == "concat":
            return torch.cat(results, 1)
        if self.kind == "difference":
            return results[0] - 0.7 * results[1]
        if self.kind == "extremum":
            return torch.maximum(*results)
        return sum(results[1:], results[0])

    def extra_repr(self) -> str:
        return self.kind


class Builder:
    """Builds one network, tracking the shape of what it has so far."""

    def __init__(self, rng: random.Random, linear: bool, dim: int | None = None):
        self.rng, self.linear = rng, linear
        self.dim = dim or rng.choice((1, 2, 2, 2, 3))

    def network(self) -> tuple[nn.Module, tuple[int, ...]]:
        channels = self.rng.choice((1, 2, 3, 4))
        sizes = tuple(self.rng.choice(SIZES[self.dim]) for _ in range(self.dim))
        layers: list[nn.Module] = []
        x = torch.zeros(2, channels, *sizes, dtype=torch.float64)
        for _ in range(self.rng.randint(1, 6)):
            layer = self.layer(x, depth=0)
            y = layer(x)
            if y.shape[0] != 2 or y.numel() > 1000 or y.numel() == 0:
                continue
            layers.append(layer)
            x = y
        if self.rng.random() < 0.4:
            layers += [nn.Flatten(), nn.Linear(x[0].numel(), self.rng.choice((1, 3, 5))).double()]
        model = nn.Sequential(*layers).double().eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                with torch.no_grad():
                    module.running_var.uniform_(0.2, 3)
                    module.running_mean.normal_()
                    module.weight.normal_()
        return model, (channels, *sizes)

    def layer(self, x: Tensor, depth: int) -> nn.Module:
        kinds = LINEAR if self.linear else LINEAR + NONLINEAR * 2
        if depth < 2:
            kinds = kinds + JOINS * 2
        for _ in range(20):
            kind = self.rng.choice(kinds)
            try:
                layer = getattr(self, kind)(x, depth) if kind in JOINS else getattr(self, kind)(x)
                layer = layer.double().eval()
                if layer(x).numel() > 0:
                    return layer
            except (ValueError, RuntimeError, AssertionError):  # a kernel larger than the input, for one
                continue
        return nn.Identity()

    def same(self, x: Tensor, depth: int) -> nn.Module:
        """A branch that keeps the shape."""
        layers: list[nn.Module] = []
        y = x
        for _ in range(self.rng.randint(0, 2)):
            layer = self.layer(y, depth)
            z = layer(y)
            if z.shape[2:] == x.shape[2:] and z.shape[0] == x.shape[0]:
                layers.append(layer)
                y = z
        if y.shape[1] != x.shape[1]:
            layers.append(CONV[self.dim](y.shape[1], x.shape[1], 1).double())
        return nn.Sequential(*layers)

    def residual(self, x: Tensor, depth: int) -> nn.Module:
        return Join("residual", nn.Identity(), self.same(x, depth + 1))

    def difference(self, x: Tensor, depth: int) -> nn.Module:
        return Join("difference", self.same(x, depth + 1), self.same(x, depth + 1))

    def concat(self, x: Tensor, depth: int) -> nn.Module:
        return Join("concat", *(self.same(x, depth + 1) for _ in range(self.rng.choice((2, 3)))))

    def split(self, x: Tensor, depth: int) -> nn.Module:
        if x.shape[1] < 2:
            raise ValueError
        return Join("split", *(self.same(p, depth + 1) for p in x.chunk(2, 1)))

    def inception(self, x: Tensor, depth: int) -> nn.Module:
        c = x.shape[1]
        convs = [CONV[self.dim](c, self.rng.choice((1, 2)), k, padding=k // 2) for k in (1, 3, 5)]
        return Join("concat", *convs)

    def mixed(self, x: Tensor, depth: int) -> nn.Module:
        return Join("residual", self.same(x, depth + 1), self.same(x, depth + 1), nn.Identity())

    def extremum(self, x: Tensor) -> nn.Module:
        return Join("extremum", self.rng.choice((nn.Identity(), Apply(lambda t: 0.1 * t))), self.same(x, 2))

    def dense(self, x: Tensor) -> nn.Module:
        pick = self.rng.choice
        mode = pick(("zeros", "zeros", "reflect", "replicate", "circular"))
        return CONV[self.dim](
            x.shape[1],
            pick((1, 2, 3)),
            pick((1, 2, 3)),
            stride=pick((1, 1, 2)),
            padding=pick((0, 1)),
            dilation=pick((1, 1, 2)),
            padding_mode=mode,
        )

    def depthwise(self, x: Tensor) -> nn.Module:
        pick, c = self.rng.choice, x.shape[1]
        return CONV[self.dim](
            c,
            c,
            pick((2, 3)),
            stride=pick((1, 1, 2)),
            padding=pick((0, 1, 1)),
            groups=c,
            padding_mode=pick(("zeros", "zeros", "circular", "replicate")),
        )

    def multiplier(self, x: Tensor) -> nn.Module:
        c = x.shape[1]
        return CONV[self.dim](c, 2 * c, 3, stride=self.rng.choice((1, 2)), padding=1, groups=c)

    def grouped(self, x: Tensor) -> nn.Module:
        if x.shape[1] % 2:
            raise ValueError
        return CONV[self.dim](x.shape[1], self.rng.choice((2, 4)), 3, padding=1, groups=2)

    def pointwise(self, x: Tensor) -> nn.Module:
        return CONV[self.dim](x.shape[1], self.rng.choice((1, 2, 3, 4)), 1, stride=self.rng.choice((1, 1, 1, 2)))

    def separable(self, x: Tensor) -> nn.Module:
        c = x.shape[1]
        return nn.Sequential(
            CONV[self.dim](c, c, 3, padding=1, groups=c),
            NORM[self.dim](c),
            CONV[self.dim](c, self.rng.choice((2, 3)), 1),
        )

    def norm(self, x: Tensor) -> nn.Module:
        return NORM[self.dim](x.shape[1])

    def average(self, x: Tensor) -> nn.Module:
        pick = self.rng.choice
        return AVERAGE[self.dim](
            pick((2, 3)),
            stride=pick((1, 2, 3)),
            padding=pick((0, 1)),
            ceil_mode=pick((False, True)),
            count_include_pad=pick((False, True)),
        )

    def adaptive(self, x: Tensor) -> nn.Module:
        return ADAPTIVE[self.dim](self.rng.choice((1, 2, 3)))

    def transposed(self, x: Tensor) -> nn.Module:
        pick, stride = self.rng.choice, self.rng.choice((1, 2))
        return CONV_T[self.dim](
            x.shape[1], pick((1, 2)), pick((2, 3)), stride=stride, padding=pick((0, 1)), output_padding=stride - 1
        )

    def scale(self, x: Tensor) -> nn.Module:
        d = torch.randn(x.shape[1], *(1,) * self.dim, dtype=torch.float64)
        return self.rng.choice(
            (
                Apply(lambda t: t * d - 1, "channels"),
                Apply(lambda t: 2.5 - t / 3, "number"),
                Apply(lambda t: t * torch.linspace(-1, 2, t.shape[-1], dtype=t.dtype), "positions"),
            )
        )

    def pad(self, x: Tensor) -> nn.Module:
        mode = self.rng.choice(("constant", "reflect", "replicate", "circular"))
        widths = [self.rng.choice((0, 1)) for _ in range(2 * self.dim)]
        return Apply(lambda t: F.pad(t, widths, mode=mode), f"pad {mode} {widths}")

    def resize(self, x: Tensor) -> nn.Module:
        smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}[self.dim]
        mode = self.rng.choice(("nearest", smooth, smooth))
        sizes = [self.rng.choice((2, 3, 5)) for _ in range(self.dim)]
        corners = self.rng.choice((False, True)) if mode != "nearest" else None
        return Apply(
            lambda t: F.interpolate(t, size=sizes, mode=mode, align_corners=corners), f"resize {mode} {sizes} {corners}"
        )

    def shuffle(self, x: Tensor) -> nn.Module:
        if self.dim == 2 and x.shape[1] % 4 == 0:
            return nn.PixelShuffle(2)
        if x.shape[1] % 2 == 0:
            return Apply(lambda t: t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), "channel shuffle")
        return Apply(lambda t: t.transpose(-1, 1), "transpose")

    def flip(self, x: Tensor) -> nn.Module:
        return self.rng.choice(
            (
                Apply(lambda t: t.flip(-1), "flip"),
                Apply(lambda t: t.roll(1, 1), "roll"),
                Apply(lambda t: t[..., 1:], "slice"),
                Apply(lambda t: t.repeat(1, 2, *(1,) * self.dim), "repeat"),
                Apply(lambda t: t.mean(-1, keepdim=True), "mean"),
                Apply(lambda t: t.sum(1, keepdim=True), "sum"),
            )
        )

    def last(self, x: Tensor) -> nn.Module:
        c = x.shape[1]
        first, second = nn.Linear(c, 2 * c).double(), nn.Linear(2 * c, c).double()
        between = nn.Identity() if self.linear else nn.GELU()

        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.between, self.second = first, between, second

            def forward(self, t: Tensor) -> Tensor:
                return self.second(self.between(self.first(t.movedim(1, -1)))).movedim(-1, 1)

        return Last()

    def activation(self, x: Tensor) -> nn.Module:
        kind = self.rng.choice(ACTIVATIONS)
        return nn.PReLU(x.shape[1], init=self.rng.choice((0.2, 1.7))) if kind is nn.PReLU else kind()

    def maximum(self, x: Tensor) -> nn.Module:
        pick = self.rng.choice
        return MAXIMUM[self.dim](pick((2, 3)), stride=pick((1, 2)), padding=pick((0, 1)), ceil_mode=pick((False, True)))

    def adaptive_maximum(self, x: Tensor) -> nn.Module:
        return ADAPTIVE_MAX[self.dim](self.rng.choice((1, 2, 3)))

    def maxmin(self, x: Tensor) -> nn.Module:
        if x.shape[1] % 2:
            raise ValueError

        def pairs(t: Tensor) -> Tensor:
            a, b = t.chunk(2, 1)
            return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)

        return Apply(pairs, "maxmin")

    def sort(self, x: Tensor) -> nn.Module:
        return Apply(lambda t: t.sort(1).values, "sort")

    def softmax(self, x: Tensor) -> nn.Module:
        return self.rng.choice((nn.Softmax(1), nn.LogSoftmax(-1), Apply(lambda t: t.amax(1, keepdim=True), "amax")))

    def where(self, x: Tensor) -> nn.Module:
        mask = torch.rand(x.shape[2:]) > 0.4
        return Apply(lambda t: torch.where(mask, t, -t), "where")


def random_network(seed: int, linear: bool, dim: int | None = None) -> tuple[nn.Module, tuple[int, ...]]:
    """A model in double precision and the shape of its input."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    result = Builder(random.Random(seed), linear, dim).network()
    torch.set_rng_state(state)
    return result


def jacobian_norm(model: nn.Module, x: Tensor, ord: float = 2) -> float:
    """‖J(x)‖ by its dense matrix."""
    jacobian = torch.func.jacrev(lambda z: model(z[None])[0])(x)
    return float(torch.linalg.matrix_norm(jacobian.detach().reshape(-1, x.numel()), ord))
