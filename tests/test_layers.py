"""`operators_of`: its operators are the layers of the model, on the sizes they get, and the model never notices."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

from opnorm import ConvOperator
from opnorm.layers import LAYERS, operators_of

pytestmark = pytest.mark.usefixtures("float64")


class Residual(nn.Module):
    """A block with a shortcut of its own stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(3, 5, 1, stride=2)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


class Pyramid(nn.Module):
    """One convolution on three sizes, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.down = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> list[Tensor]:
        sizes = [x, x.flip(-1), self.down(x), self.down(self.down(x))]
        return [self.shared(y) for y in sizes]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 5, 3)
        self.vector = nn.Linear(7, 5)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.image(image).mean((-2, -1)) + self.vector(vector)


class Upsampling(nn.Module):
    """A transposed convolution whose output size, and so its output padding, comes with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=2)
        self.up = nn.ConvTranspose2d(3, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x), output_size=x.shape[-2:])


class SamePadding(nn.Conv2d):
    """TensorFlow's padding: a forward of its own that pads on one side and convolves without padding."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class Standardised(nn.Conv2d):
    """A forward of its own, with another kernel than the layer's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


class ByHand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(input=x)


class Doubled(nn.Module):
    """A parametrization with a linear layer of its own, which acts on the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * self.inner(weight)


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 5 * 9, 7), nn.Linear(7, 7))
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    parametrizations.orthogonal(model[3])
    return model


def parametrized_by_layer() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


def hooked() -> nn.Module:
    """The older way: the weight is an attribute written by a hook before forward."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3))
    prune.random_unstructured(model[0], "weight", 0.5)
    spectral_norm(model[1])
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, stride=2), nn.Conv2d(3, 3, 1))
    model[1].weight = model[0].weight
    return model


def twice_registered() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "residual": (Residual, (3, 13, 11)),
    "pyramid": (Pyramid, (3, 12, 20)),
    "two inputs": (TwoInputs, ((3, 11, 7), (7,))),
    "upsampling": (Upsampling, (2, 10, 7)),
    "keyword": (Keyword, (2, 11)),
    "parametrized": (parametrized, (3, 7, 11)),
    "parametrized by a layer": (parametrized_by_layer, (3, 7, 11)),
    "hooked": (hooked, (3, 7, 11)),
    "tied": (tied, (3, 13, 11)),
    "twice registered": (twice_registered, (3, 13, 11)),
    "tokens": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (13, 7)),
    "circular": (lambda: nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="circular"), (3, 7, 11)),
    "reflect": (lambda: nn.Conv1d(3, 5, 4, padding="same", padding_mode="reflect"), (3, 11)),
    "same": (lambda: nn.Conv1d(3, 5, 3, dilation=2, padding="same"), (3, 11)),
    "three dimensions": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 4, 3, stride=2, groups=2, dilation=2), nn.ConvTranspose3d(4, 2, 2, groups=2)
        ),
        (2, 7, 11, 9),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 11, batch_first=True),
        (5, 6),
    ),
}


@pytest.fixture(params=MODELS)
def model_and_shape(request: pytest.FixtureRequest, device: torch.device, float64: None) -> tuple[nn.Module, Any]:
    build, shape = MODELS[request.param]
    return build().to(device), shape


def examples(model: nn.Module, shape: Any, batch: int = 1) -> tuple[Tensor, ...]:
    """A batch for each input, on the device of the model."""
    shapes = shape if isinstance(shape[0], tuple) else (shape,)
    like = next(model.parameters()).detach()
    return tuple(torch.randn_like(like.new_empty(batch, *s)) for s in shapes)


def layer_calls(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The (input, output without bias) of every call of every layer, in a real forward pass in eval mode."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook_of(name: str) -> Callable:
        def hook(layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            bias = 0 if layer.bias is None else layer.bias
            if not isinstance(layer, nn.Linear) and layer.bias is not None:
                bias = layer.bias.reshape(-1, *[1] * (output.dim() - 2))
            calls.setdefault(name, []).append((args[0] if args else kwargs["input"], output - bias))

        return hook

    model.eval()
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and "parametrizations" not in name:
            module.register_forward_hook(hook_of(name), with_kwargs=True)
    model(*inputs)
    return calls


def snapshot(model: nn.Module) -> list[Any]:
    """All that a user could find changed: attributes, flags and hooks by identity, tensors by value and version too."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        groups = [module.__dict__, *(value for value in module.__dict__.values() if isinstance(value, dict))]
        found += [(name, type(module)), *((key, described(value)) for group in groups for key, value in group.items())]
    return found


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), type(value), value._version, value.requires_grad, value.tolist()
    return id(value), copy.copy(value) if isinstance(value, bool | int | str | list | set) else None


class TestLaws:
    def test_each_operator_maps_as_its_layer_does(self, model_and_shape: tuple[nn.Module, Any]) -> None:
        """On the inputs that the layer gets in a real pass: geometry, weight and size at once."""
        model, shape = model_and_shape
        operators = operators_of(model, shape).by_module()
        calls = layer_calls(model, examples(model, shape))
        assert operators.keys() == calls.keys()
        for name, pairs in calls.items():
            for x, y in pairs:
                assert any(agrees(operator, x, y) for operator in operators[name]), name
            for operator in operators[name]:
                assert any(agrees(operator, x, y) for x, y in pairs), f"{name}: {operator.geometry} is no size of it"

    def test_nothing_changes(self, model_and_shape: tuple[nn.Module, Any]) -> None:
        model, shape = model_and_shape
        for index, module in enumerate(model.modules()):
            module.training = index % 3 != 1  # flags that no train() or eval() would restore
        before, states = snapshot(model), (torch.get_rng_state(), random.getstate())
        operators_of(model, shape)
        assert snapshot(model) == before
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]

    def test_an_example_gives_what_its_shape_gives(self, model_and_shape: tuple[nn.Module, Any]) -> None:
        model, shape = model_and_shape
        by_shape, by_example = operators_of(model, shape), operators_of(model, examples(model, shape, batch=2))
        assert [*by_shape] == [*by_example]
        assert by_shape.left_out == by_example.left_out
        for key, operator in by_shape.items():
            assert operator.geometry == by_example[key].geometry

    def test_training_flags_do_not_matter(self, model_and_shape: tuple[nn.Module, Any]) -> None:
        model, shape = model_and_shape
        one, two = operators_of(model.train(), shape), operators_of(model.eval(), shape)
        assert [*one] == [*two]
        for key in one:
            torch.testing.assert_close(one[key].weight, two[key].weight, rtol=0, atol=0)


def agrees(operator: ConvOperator, x: Tensor, y: Tensor) -> bool:
    geometry = operator.geometry
    if geometry.dim == 0:
        return torch.allclose(operator.matvec(x), y)
    sizes_fit = tuple(x.shape[2:]) == geometry.input_size and tuple(y.shape[2:]) == geometry.output_size
    return sizes_fit and torch.allclose(operator.matvec(x), y)


class TestSizes:
    def test_a_layer_called_on_several_sizes_keeps_each(self) -> None:
        operators = operators_of(Pyramid(), (3, 12, 20))
        assert {key: operator.geometry.input_size for key, operator in operators.items()} == {
            "shared": (12, 20),
            "shared@6×10": (6, 10),
            "shared@3×5": (3, 5),
        }
        assert operators.by_module() == {"shared": list(operators.values())}

    def test_two_geometries_on_one_size_have_two_keys(self) -> None:
        class Alternating(nn.Conv1d):
            def forward(self, x: Tensor) -> Tensor:
                strided = [F.conv1d(x, self.weight, self.bias, stride) for stride in (1, 2, 3)]
                return torch.cat(strided, -1)

        operators = operators_of(nn.Sequential(Alternating(2, 2, 3)), (2, 11))
        assert {key: o.geometry.stride for key, o in operators.items()} == {"0": (1,), "0@11": (2,), "0@11#2": (3,)}

    def test_order_is_that_of_the_calls(self) -> None:
        class Reversed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last = nn.Linear(3, 2)
                self.first = nn.Linear(5, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.first(x))

        assert [*operators_of(Reversed(), (5,))] == ["first", "last"]

    def test_any_size_where_the_input_is_of_any_size(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 5, 3, stride=2),
            nn.AdaptiveAvgPool2d((7, 5)),
            nn.Conv2d(5, 2, 3),
            nn.Flatten(),
            nn.Linear(30, 3),
        )
        operators = operators_of(model, (3, None, None))
        assert [o.geometry.input_size for o in operators.values()] == [(None, None), (7, 5), ()]
        half = operators_of(model, (3, None, 31))
        assert half["0"].geometry.input_size == (None, 31)

    def test_any_size_of_long_strides(self) -> None:
        """As in audio, where 256 samples are not enough for one output."""
        model = nn.Sequential(nn.Conv1d(1, 2, 400, stride=320), nn.Conv1d(2, 2, 3))
        assert [o.geometry.input_size for o in operators_of(model, (1, None)).values()] == [(None,), (None,)]

    def test_any_size_with_calls_that_depend_on_the_size(self) -> None:
        class Halving(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv1d(2, 2, 3, stride=2)

            def forward(self, x: Tensor) -> Tensor:
                while x.shape[-1] > 8:
                    x = self.conv(x)
                return x

        operators = operators_of(Halving(), (2, None))
        assert [o.geometry.input_size for o in operators.values()] == [(None,)]
        assert [o.geometry.input_size for o in operators_of(Halving(), (2, 23)).values()] == [(23,), (11,)]

    def test_any_size_is_refused_by_a_model_of_one_size(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(25, 2))
        with pytest.raises(ValueError, match=r"accepts every size.*give the sizes.*in 2 \(Linear\)"):
            operators_of(model, (1, None, None))

    def test_without_a_shape_every_layer_is_on_any_size(self) -> None:
        operators = operators_of(TwoInputs(), None)
        assert {key: o.geometry.input_size for key, o in operators.items()} == {"image": (None, None), "vector": ()}
        assert operators.left_out == {}

    def test_unbatched_keyword_and_integer_inputs(self) -> None:
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 3)

            def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
                return self.out(self.embed(ids)) * scale

        ids = torch.randint(7, (2, 11))
        assert [*operators_of(Tokens(), {"scale": (1, 1), "ids": ids})] == ["out"]
        assert [*operators_of(Tokens(), (ids, (1, 1)))] == ["out"]
        assert operators_of(nn.Conv2d(2, 3, 3), torch.randn(2, 7, 5))[""].geometry.input_size == (7, 5)

    def test_no_memory_is_taken(self) -> None:
        """An activation of this model would take 64 terabytes."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
        assert operators_of(model, (3, 10**6, 10**6))["3"].geometry.input_size == (10**6, 10**6)


class TestWeights:
    def test_is_the_parameter_itself(self) -> None:
        model = Residual()
        operators = operators_of(model, (3, 13, 11))
        assert all(operators[name].weight is model.get_submodule(name).weight for name in operators)

    def test_tied_weights_have_an_operator_for_each_layer(self) -> None:
        operators = operators_of(tied(), (3, 13, 11))
        assert operators["0"].weight is operators["1"].weight
        assert operators["0"].geometry.stride != operators["1"].geometry.stride

    @pytest.mark.parametrize("build", [parametrized, parametrized_by_layer, hooked])
    def test_gradients_reach_the_parameters_behind(self, build: Callable[[], nn.Module]) -> None:
        model = build()
        sum(o.weight.square().sum() for o in operators_of(model, (3, 7, 11)).values()).backward()
        without = [name for name, p in model.named_parameters() if p.grad is None and not name.endswith("bias")]
        assert not without

    def test_a_hooked_weight_is_that_of_the_parameters_now(self) -> None:
        """Between two forward passes the attribute is older than the parameters, as after an optimizer step."""
        model = hooked().eval()
        model(torch.randn(1, 3, 7, 11))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        weight = operators_of(model, (3, 7, 11))["0"].weight
        torch.testing.assert_close(weight, model[0].weight_orig * model[0].weight_mask)

    def test_within_parametrize_cached(self) -> None:
        model = parametrized()
        with parametrize.cached():
            operators = operators_of(model, (3, 7, 11))
            assert len(operators) == 3
            assert model(torch.randn(2, 3, 7, 11)).isfinite().all()  # the cache holds real tensors

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_in_every_precision(self, dtype: torch.dtype) -> None:
        operators = operators_of(Residual().to(dtype), (3, 13, 11))
        assert {o.weight.dtype for o in operators.values()} == {dtype}

    def test_on_the_device_of_the_model(self, device: torch.device) -> None:
        operators = operators_of(Residual().to(device), (3, 13, 11))
        assert {o.weight.device.type for o in operators.values()} == {device.type}


class TestLeftOut:
    def test_a_layer_never_called(self) -> None:
        model = Residual()
        model.spare = nn.Linear(3, 2)
        operators = operators_of(model, (3, 13, 11))
        assert [*operators] == ["conv", "shortcut"]
        assert operators.left_out == {"spare": "never called by forward"}

    def test_a_forward_that_pads_is_described_by_what_it_computes(self) -> None:
        operators = operators_of(nn.Sequential(SamePadding(3, 5, 3, stride=2)), (3, 11, 8))
        geometry = operators["0"].geometry
        assert (geometry.input_size, geometry.padding, geometry.stride) == ((12, 9), ((0, 0), (0, 0)), (2, 2))

    @pytest.mark.parametrize("change", [lambda layer: None, parametrizations.weight_norm])
    def test_a_forward_with_another_kernel_has_no_operator(self, change: Callable) -> None:
        model = nn.Sequential(Standardised(3, 5, 3), nn.Conv2d(5, 2, 1))
        change(model[0])
        operators = operators_of(model, (3, 7, 11))
        assert [*operators] == ["1"]
        assert operators.left_out == {"0": "its forward calls conv2d with another tensor than the layer's weight"}

    def test_a_forward_by_matrix_product_has_no_operator(self) -> None:
        operators = operators_of(nn.Sequential(ByHand(3, 2)), (3,))
        assert not operators
        assert "not seen to use" in operators.left_out["0"]

    def test_a_forward_of_its_own_with_a_computed_weight_is_recognised(self) -> None:
        model = nn.Sequential(SamePadding(3, 5, 3))
        parametrizations.weight_norm(model[0])
        assert [*operators_of(model, (3, 7, 11))] == ["0"]

    def test_functional_convolutions_and_attention_are_reported(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.kernel = nn.Parameter(torch.randn(2, 2, 3))
                self.block = nn.TransformerEncoderLayer(2, 1, 3, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                return self.block(F.conv1d(x, self.kernel).mT)

        operators = operators_of(Functional(), (2, 11))
        assert [*operators] == ["block.linear1", "block.linear2"]
        assert operators.left_out == {
            "": "calls conv1d itself, and only layers are covered",
            "block.self_attn": "MultiheadAttention computes with its weights itself, not with layers",
            "block.self_attn.out_proj": "used inside nn.MultiheadAttention, which does not call it",
        }

    def test_another_padding_than_the_attributes_say_is_described_by_what_it_computes(self) -> None:
        class Reflecting(nn.Conv1d):
            def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return F.conv1d(F.pad(x, (2, 2), mode="reflect"), weight, bias)

        geometry = operators_of(nn.Sequential(Reflecting(2, 2, 3, padding=1, padding_mode="circular")), (2, 11))[
            "0"
        ].geometry
        assert (geometry.input_size, geometry.padding, geometry.padding_mode) == ((15,), ((0, 0),), "zeros")

    def test_nothing_is_left_out_that_computes_a_weight(self) -> None:
        for build in (parametrized, parametrized_by_layer, hooked):
            assert operators_of(build(), (3, 7, 11)).left_out == {}

    def test_recurrent_layers_are_reported(self) -> None:
        operators = operators_of(nn.Sequential(nn.Linear(3, 2), nn.LSTM(2, 5)), (7, 3))
        assert [*operators] == ["0"]
        assert operators.left_out == {"1": "LSTM computes with its weights itself, not with layers"}


class Branching(nn.Module):
    """Looks at values, writes into a buffer, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.cache["x"] = F.dropout(x)
        self.seen += 1 + random.random()
        return self.conv(x) if x.sum() > 0 else x


class TestForward:
    def test_what_looks_at_values_needs_an_example(self) -> None:
        with pytest.raises(ValueError, match=r"looks at values.*pass an example batch"):
            operators_of(Branching(), (2, 11))
        assert [*operators_of(Branching(), torch.ones(1, 2, 11))] == ["conv"]
        assert operators_of(Branching(), -torch.ones(1, 2, 11)).left_out == {"conv": "never called by forward"}

    def test_a_real_pass_changes_nothing_either(self) -> None:
        model = Branching().train()
        before, states = snapshot(model), (torch.get_rng_state(), random.getstate())
        operators_of(model, torch.ones(1, 2, 11))
        assert snapshot(model) == before
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]

    def test_a_forward_that_keeps_tensors_keeps_none_of_ours(self) -> None:
        class Caching(Branching):
            def forward(self, x: Tensor) -> Tensor:
                self.last = self.cache["x"] = x
                self.seen += 1
                return self.conv(x)

        model = Caching()
        before = snapshot(model)
        operators_of(model, (2, 11))
        assert snapshot(model) == before

    @pytest.mark.parametrize("example", [False, True])
    def test_nothing_changes_when_forward_raises(self, example: bool) -> None:
        class Broken(Branching):
            def forward(self, x: Tensor) -> Tensor:
                super().forward(x)
                raise KeyError("no such thing")

        model = nn.Sequential(nn.Identity(), Broken()).train()
        before = snapshot(model)
        with pytest.raises(ValueError, match="in 1 \\(Broken\\)"):
            operators_of(model, torch.ones(1, 2, 11) if example else (2, 11))
        assert snapshot(model) == before

    def test_no_graph_is_recorded(self) -> None:
        class Watching(Branching):
            def forward(self, x: Tensor) -> Tensor:
                if torch.is_grad_enabled():
                    raise RuntimeError("a graph of activations would be kept")
                return super().forward(x)

        operators = operators_of(Watching(), torch.ones(1, 2, 11))
        assert operators["conv"].weight.requires_grad

    def test_eval_and_train_are_not_called(self) -> None:
        """Some models fuse their weights there."""

        class Fusing(nn.Conv1d):
            def train(self, mode: bool = True) -> Fusing:
                raise AssertionError("train() was called")

        assert [*operators_of(nn.Sequential(Fusing(2, 2, 3)), (2, 11))] == ["0"]

    def test_wrong_shapes_name_the_layer(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(7, 2))
        with pytest.raises(ValueError, match=r"shape \(1, 3, 9, 9\).*in 2 \(Linear\).*check input_shape"):
            operators_of(model, (3, 9, 9))
        with pytest.raises(ValueError, match=r"in 0 \(Conv2d\)"):
            operators_of(model, (4, 9, 9))
        with pytest.raises(ValueError, match=r"the example batch.*in 2 \(Linear\)"):
            operators_of(model, torch.randn(1, 3, 9, 9))

    @pytest.mark.parametrize("shape", [5, "3,224,224", (3, -1, 4), (3, 0, 4), (3, 2.5, 4), ((3, 4), "x")])
    def test_what_is_no_shape(self, shape: Any) -> None:
        with pytest.raises(ValueError, match="expected input_shape as positive sizes without batch"):
            operators_of(Residual(), shape)

    def test_a_compiled_model_is_not_run_compiled(self) -> None:
        compiled: list[Any] = []
        model = torch.compile(
            nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()), backend=lambda graph, _: compiled.append(graph)
        )
        assert [*operators_of(model, (3, 7, 11))] == ["_orig_mod.0"]
        assert not compiled


class TestRefusals:
    def test_lazy_layers(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.LazyLinear(3))
        with pytest.raises(ValueError, match="got '2' still lazy; run the model on a batch first"):
            operators_of(model, (3, 7, 11))
        model(torch.randn(1, 3, 7, 11))
        assert [*operators_of(model, (3, 7, 11))] == ["0", "2"]

    def test_meta_device(self) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(7)))
        with pytest.raises(ValueError, match=r"got '0', '1', '2', '3' and 3 more on the meta device; call .*to_empty"):
            operators_of(model, (3,))

    def test_complex_weights_name_the_layer(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3, dtype=torch.complex128))
        with pytest.raises(ValueError, match="layer '0': expected a real floating point weight"):
            operators_of(model, torch.randn(1, 3, dtype=torch.complex128))

    def test_wrapped_and_scripted_models(self) -> None:
        with pytest.raises(ValueError, match=r"pass model\.module"):
            operators_of(nn.DataParallel(Residual()), (3, 7, 11))
        with pytest.raises(ValueError, match=r"expected an eager .*, got str"):
            operators_of("model", (3, 7, 11))  # type: ignore[arg-type]
