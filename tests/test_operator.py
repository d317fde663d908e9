"""`ConvOperator` against torch's own layers, in every geometry: it is the truth that the methods are tested against."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import batches, case
from opnorm.geometry import ConvGeometry
from opnorm.operator import ConvOperator

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def module_of(operator: ConvOperator) -> nn.Module:
    """torch's layer for an operator; unequal sides, which torch's layers do not know, are padded or cropped outside."""
    g, both = operator.geometry, all(a == b for a, b in operator.geometry.padding)
    if g.dim == 0:
        module: nn.Module = nn.Linear(g.in_channels, g.out_channels, bias=False)
    elif g.transposed:
        pads = tuple(a for a, _ in g.padding) if both else 0
        module = CONV_TRANSPOSE[g.dim](
            g.in_channels, g.out_channels, g.kernel_size, g.stride, pads, g.output_padding, g.groups, False, g.dilation
        )
    else:
        pads = tuple(a for a, _ in g.padding) if both else 0
        module = CONV[g.dim](
            g.in_channels, g.out_channels, g.kernel_size, g.stride, pads, g.dilation, g.groups, False, g.padding_mode
        )
    module = module.to(operator.weight)
    module.weight = nn.Parameter(operator.weight)
    return module if both else OneSided(module, g)


class OneSided(nn.Module):
    def __init__(self, module: nn.Module, geometry: ConvGeometry):
        super().__init__()
        self.module, self.geometry = module, geometry

    def forward(self, x: Tensor) -> Tensor:
        g = self.geometry
        sides = [n for pair in reversed(g.padding) for n in pair]
        if g.transposed:
            return F.pad(self.module(x), [-n for n in sides])
        mode = {"zeros": "constant"}.get(g.padding_mode, g.padding_mode)
        return self.module(F.pad(x, sides, mode=mode))


def random_like(shape: tuple[int | None, ...], seed: int, operator: ConvOperator) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)  # type: ignore[arg-type]
    return x.to(operator.weight)


def example(**changes: object) -> ConvOperator:
    fields = {"kernel_size": (3, 2), "input_size": (5, 7), "padding": 1, "groups": 2} | changes
    geometry = ConvGeometry(2, 4, **fields)  # type: ignore[arg-type]
    weight = torch.randn(geometry.weight_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ConvOperator(geometry, weight)


@pytest.mark.parametrize("batch", batches(), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_matvec_is_torchs_own_layer_in_every_geometry(batch, device):
    for index in batch:
        operator = case(index).operator(device=device)
        g = operator.geometry
        x = random_like((2, g.in_channels, *g.input_size), index, operator)
        ours, theirs = operator.matvec(x), module_of(operator)(x)
        assert ours.shape == theirs.shape == (2, g.out_channels, *g.output_size), case(index)
        scale = operator.weight.abs().max() * x.abs().max()
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12 * float(scale)), case(index)


@pytest.mark.parametrize("batch", batches(), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_rmatvec_is_the_adjoint_in_every_geometry(batch, device):
    """⟨y, Kx⟩ = ⟨Kᵀy, x⟩."""
    for index in batch:
        operator = case(index).operator(device=device)
        g = operator.geometry
        x = random_like((g.in_channels, *g.input_size), index, operator)
        y = random_like((g.out_channels, *g.output_size), index + 1, operator)
        forward, backward = operator.matvec(x), operator.rmatvec(y)
        left, right = (y * forward).sum(), (backward * x).sum()
        tolerance = 1e-12 * float((y * forward).abs().sum() + (backward * x).abs().sum())
        assert abs(left - right) <= tolerance, case(index)


@pytest.mark.parametrize("batch", batches(300), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_to_dense_is_the_matrix_of_matvec_and_its_transpose_of_rmatvec(batch, device):
    for index in batch:
        operator = case(index).operator(device=device)
        g = operator.geometry
        dense = operator.to_dense()
        assert dense.shape == (g.out_channels * math.prod(g.output_size), g.in_channels * math.prod(g.input_size))
        x = random_like((g.in_channels, *g.input_size), index, operator)
        y = random_like((g.out_channels, *g.output_size), index + 1, operator)
        atol = 1e-11 * float(operator.weight.abs().max()) + 1e-300
        assert torch.allclose(dense @ x.flatten(), operator.matvec(x).flatten(), rtol=1e-11, atol=atol), case(index)
        assert torch.allclose(dense.T @ y.flatten(), operator.rmatvec(y).flatten(), rtol=1e-11, atol=atol), case(index)


def test_to_dense_of_a_convolution_by_hand():
    weight = torch.tensor([[[1.0, 2.0, 3.0]]])
    dense = ConvOperator(ConvGeometry(1, 1, 3, 3, padding=1), weight).to_dense()
    assert torch.equal(dense, torch.tensor([[2.0, 3.0, 0.0], [1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]))
    circular = ConvOperator(ConvGeometry(1, 1, 3, 3, padding=1, padding_mode="circular"), weight).to_dense()
    assert torch.equal(circular, torch.tensor([[2.0, 3.0, 1.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]]))
    reflect = ConvOperator(ConvGeometry(1, 1, 3, 3, padding=1, padding_mode="reflect"), weight).to_dense()
    assert torch.equal(reflect, torch.tensor([[2.0, 4.0, 0.0], [1.0, 2.0, 3.0], [0.0, 4.0, 2.0]]))
    replicate = ConvOperator(ConvGeometry(1, 1, 3, 3, padding=1, padding_mode="replicate"), weight).to_dense()
    assert torch.equal(replicate, torch.tensor([[3.0, 3.0, 0.0], [1.0, 2.0, 3.0], [0.0, 1.0, 5.0]]))


def test_to_dense_of_a_transposed_convolution_by_hand():
    weight = torch.tensor([[[1.0, 2.0, 3.0]]])
    geometry = ConvGeometry(1, 1, 3, 2, stride=2, padding=1, output_padding=1, transposed=True)
    dense = ConvOperator(geometry, weight).to_dense()
    assert torch.equal(dense, torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 2.0], [0.0, 3.0]]))


def test_to_dense_of_a_linear_layer_is_its_weight():
    weight = torch.randn(3, 5)
    assert torch.equal(ConvOperator(ConvGeometry(5, 3, (), ()), weight).to_dense(), weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_batch_dimensions_are_kept(transposed, device):
    operator = example(transposed=transposed)
    g = operator.geometry
    x = random_like((2, 3, g.in_channels, *g.input_size), 0, operator)
    y = random_like((2, 3, g.out_channels, *g.output_size), 1, operator)
    assert operator.matvec(x).shape == y.shape
    assert operator.rmatvec(y).shape == x.shape
    assert torch.allclose(operator.matvec(x)[1, 2], operator.matvec(x[1, 2]))
    assert torch.allclose(operator.rmatvec(y)[1, 2], operator.rmatvec(y[1, 2]))
    assert operator.matvec(x[:0]).shape == (0, 3, g.out_channels, *g.output_size)


@pytest.mark.parametrize("index", random.Random(0).sample(range(2000), 12))
def test_the_gradient_with_respect_to_the_weight(index, device):
    drawn = case(index).operator(device=device)
    g = drawn.geometry
    x = random_like((g.in_channels, *g.input_size), index, drawn)
    y = random_like((g.out_channels, *g.output_size), index + 1, drawn)
    weight = random_like(g.weight_shape, index, drawn).requires_grad_()
    (forward,) = torch.autograd.grad((ConvOperator(g, weight).matvec(x) * y).sum(), weight)
    (backward,) = torch.autograd.grad((ConvOperator(g, weight).rmatvec(y) * x).sum(), weight)
    assert torch.allclose(forward, backward, rtol=1e-9, atol=1e-9), case(index)
    module = module_of(ConvOperator(g, weight.detach()))
    (module(x[None])[0] * y).sum().backward()
    (parameter,) = module.parameters()
    assert torch.allclose(forward, parameter.grad, rtol=1e-9, atol=1e-9), case(index)


def test_to_and_detach():
    operator = example()
    assert operator.to(torch.float32).weight.dtype == torch.float32
    assert operator.to(torch.float32).geometry == operator.geometry
    tracked = ConvOperator(operator.geometry, operator.weight.clone().requires_grad_())
    assert not tracked.detach().weight.requires_grad
    assert tracked.to_dense().requires_grad


def test_an_input_of_the_wrong_shape_is_refused():
    operator = example()
    with pytest.raises(ValueError, match=r"expected x of shape \(2, 5, 7\).*got \(2, 7, 5\)"):
        operator.matvec(torch.zeros(2, 7, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected y of shape \(4, 5, 8\).*got \(4, 5, 7\)"):
        operator.rmatvec(torch.zeros(4, 5, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected x of shape"):
        operator.matvec(torch.zeros(7, dtype=torch.float64))


def test_an_input_of_another_dtype_or_device_is_refused():
    operator = example()
    with pytest.raises(ValueError, match=r"expected x as torch.float64 on cpu .* got torch.float32"):
        operator.matvec(torch.zeros(2, 5, 7))
    with pytest.raises(ValueError, match=r"got torch\.float64 on meta"):
        operator.matvec(torch.zeros(2, 5, 7, dtype=torch.float64, device="meta"))


def test_an_operator_of_any_size_has_no_matrix():
    operator = example(input_size=None)
    for call in (operator.to_dense, lambda: operator.matvec(torch.zeros(2, 5, 7, dtype=torch.float64))):
        with pytest.raises(ValueError, match=r"expected a geometry with an input size, got .*geometry\.at\("):
            call()


def test_a_weight_of_the_wrong_shape_is_refused():
    geometry = ConvGeometry(4, 6, 3, (5, 7), groups=2)
    with pytest.raises(ValueError, match=r"expected a weight of shape \(6, 2, 3, 3\) .* got \(6, 4, 3, 3\); check"):
        ConvOperator(geometry, torch.zeros(6, 4, 3, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_weight_that_is_not_real_floating_point_is_refused(dtype):
    with pytest.raises(ValueError, match=f"expected a real floating point weight tensor, got {dtype}; convert"):
        ConvOperator(ConvGeometry(1, 1, 3, 5), torch.ones(1, 1, 3).to(dtype))


def test_a_weight_that_is_no_tensor_or_has_no_values_is_refused():
    with pytest.raises(ValueError, match="expected a real floating point weight tensor, got list"):
        ConvOperator(ConvGeometry(1, 1, 3, 5), [[[1.0, 2.0, 3.0]]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta device; materialise"):
        ConvOperator(ConvGeometry(1, 1, 3, 5), torch.ones(1, 1, 3, device="meta"))
