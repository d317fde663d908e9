"""Bad input: a clear error or the right number, never NaN, a crash or a silent 1."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from opnorm import (
    ConvGeometry,
    ConvOperator,
    Exact,
    FourierBound,
    GramIteration,
    PowerIteration,
    conv_norm,
    joint_norm,
    operator_norm,
)
from opnorm.norms import baselines

METHODS = [
    FourierBound(),
    FourierBound(refine=4),
    PowerIteration(),
    PowerIteration(prove=True),
    GramIteration(),
    Exact(),
    Exact(dense=4),
    *(getattr(baselines, name)() for name in baselines.__all__),
    "auto",
]
GEOMETRIES = {
    "depthwise": ConvGeometry(4, 4, 3, (5, 7), padding=1, groups=4),
    "strided": ConvGeometry(4, 4, 3, (5, 7), padding=1, stride=2, groups=4),
    "dense": ConvGeometry(3, 2, 3, (5, 7), padding=1),
    "transposed": ConvGeometry(2, 3, 3, (3, 5), stride=2, transposed=True),
    "pointwise": ConvGeometry(3, 5, 1, (5, 7)),
    "linear": ConvGeometry(5, 3, (), ()),
}
PAIRS = [(m, name) for m in METHODS for name, g in GEOMETRIES.items() if m == "auto" or m.supports(g)]  # type: ignore[union-attr]
each_pair = pytest.mark.parametrize(("method", "name"), PAIRS, ids=str)


def gaussian(geometry: ConvGeometry, dtype: torch.dtype = torch.float64) -> ConvOperator:
    generator = torch.Generator().manual_seed(0)
    return ConvOperator(geometry, torch.randn(geometry.weight_shape, generator=generator, dtype=dtype))


# Values


@each_pair
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_weights_are_named(method, name, bad, device):
    for place in (0, -1):
        weight = gaussian(GEOMETRIES[name]).weight.clone().to(device)
        weight.view(-1)[place] = bad
        with pytest.raises(ValueError, match=r"expected finite weights, got NaN or infinite ones for .*; look for"):
            operator_norm(ConvOperator(GEOMETRIES[name], weight), method)


@each_pair
def test_nan_weights_are_named_under_autograd_too(method, name, device):
    weight = gaussian(GEOMETRIES[name]).weight.clone().to(device)
    weight.view(-1)[3] = math.nan
    with pytest.raises(ValueError, match="expected finite weights, got NaN"):
        operator_norm(ConvOperator(GEOMETRIES[name], weight.requires_grad_()), method)


@pytest.mark.parametrize("ord", [1, math.inf])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_nan_weights_are_named_for_the_induced_norms(ord, name, device):
    weight = gaussian(GEOMETRIES[name]).weight.clone().to(device)
    weight.view(-1)[3] = math.nan
    with pytest.raises(ValueError, match="expected finite weights, got NaN"):
        operator_norm(ConvOperator(GEOMETRIES[name], weight), ord=ord)


@each_pair
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_kernels_have_norm_zero_and_a_finite_gradient(method, name, dtype, device):
    weight = torch.zeros(GEOMETRIES[name].weight_shape, dtype=dtype, device=device).requires_grad_()
    bound = operator_norm(ConvOperator(GEOMETRIES[name], weight), method)
    assert float(bound) == 0
    if bound.value.requires_grad:
        bound.value.backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()


@each_pair
def test_one_zero_channel_is_no_harm(method, name, device):
    operator = gaussian(GEOMETRIES[name])
    weight = operator.weight.clone().to(device)
    weight[0] = 0
    weight.requires_grad_()
    bound = operator_norm(ConvOperator(GEOMETRIES[name], weight), method)
    assert 0 < float(bound) < math.inf
    if bound.value.requires_grad:
        bound.value.backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()


# The published rule of the pointwise method stops at an absolute residual, so that it does not scale.
SCALED = [(m, name) for m, name in PAIRS if not (isinstance(m, baselines.Runkel2021) and GEOMETRIES[name].is_matrix)]


@pytest.mark.parametrize(("method", "name"), SCALED, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_weights_whose_squares_leave_its_range(method, name, scale, device):
    """No underflow to 0, no overflow to infinity, where the norm itself can be written."""
    operator = gaussian(GEOMETRIES[name], torch.float32)
    one = operator_norm(ConvOperator(operator.geometry, operator.weight.to(device)), method)
    far = operator_norm(ConvOperator(operator.geometry, scale * operator.weight.to(device)), method)
    assert float(far) == pytest.approx(scale * float(one), rel=1e-3)


def test_a_norm_beyond_its_dtype_is_named(device):
    weight = torch.full((1, 1, 3), 3e38, device=device)
    with pytest.raises(ValueError, match="expected a norm within the range of its dtype, got inf"):
        operator_norm(ConvOperator(ConvGeometry(1, 1, 3, 7, padding=1), weight))


def test_subnormal_weights(device):
    operator = ConvOperator(ConvGeometry(1, 1, 3, 7, padding=1), torch.full((1, 1, 3), 1e-42, device=device))
    norm = torch.linalg.svdvals(ConvOperator(operator.geometry, operator.weight.double()).to_dense())[0]
    assert float(norm) <= float(operator_norm(operator)) <= 1.01 * float(norm)


# Sizes


def test_an_empty_output_is_refused():
    with pytest.raises(
        ValueError, match=r"expected an output of at least one element, got size -1 .*; enlarge the input"
    ):
        conv_norm(torch.ones(1, 1, 5), 3)
    with pytest.raises(ValueError, match=r"expected an output of at least one element, got size 0"):
        conv_norm(torch.ones(1, 1, 5), 4)


def test_a_kernel_larger_than_the_padded_input_is_refused():
    with pytest.raises(
        ValueError, match=r"got size 0 in dimension 1: input 2, padding \(1, 1\), kernel extent 5; enlarge"
    ):
        conv_norm(torch.ones(1, 1, 3, 5), (7, 2), padding=1)


@pytest.mark.parametrize("method", [FourierBound(refine=1), Exact(), Exact(dense=1), "auto"], ids=str)
def test_a_kernel_larger_than_the_input_but_not_than_the_padded_one(method, device):
    """Most taps only ever read padding: the norm is that of the few that do not."""
    weight = torch.tensor([[[8.0, 1.0, 8.0]]], dtype=torch.float64, device=device)
    operator = ConvOperator(ConvGeometry(1, 1, 3, 1, padding=1), weight)
    assert float(operator_norm(operator, method)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("method", [FourierBound(), Exact(), PowerIteration(), "auto"], ids=str)
def test_outputs_that_read_nothing_but_padding(method, device):
    """Stride and padding such that no output reads an input: the zero operator, whatever the kernel."""
    operator = ConvOperator(
        ConvGeometry(1, 1, 1, 1, stride=2, padding=1), torch.ones(1, 1, 1, device=device).requires_grad_()
    )
    assert not operator.to_dense().any()
    bound = operator_norm(operator, method)
    assert float(bound) == 0
    bound.value.backward()
    assert operator.weight.grad is not None
    assert operator.weight.grad.isfinite().all()


def test_an_input_size_with_batch_or_channels_is_refused():
    with pytest.raises(
        ValueError, match=r"expected input_size with 2 spatial dimensions.*got \(1, 3, 5, 7\); leave out batch"
    ):
        conv_norm(torch.ones(4, 3, 3, 3), (1, 3, 5, 7))


# Types and shapes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64])
def test_integer_and_complex_weights_are_refused(dtype):
    with pytest.raises(ValueError, match=f"expected a real floating point weight tensor, got {dtype}; convert it"):
        conv_norm(torch.ones(4, 1, 3, 3).to(dtype), (5, 7), groups=4)


def test_weights_on_the_meta_device_are_refused():
    with pytest.raises(ValueError, match="meta device; materialise the model first"):
        conv_norm(torch.ones(4, 1, 3, 3, device="meta"), (5, 7), groups=4)


@pytest.mark.parametrize(
    ("weight", "got"), [(torch.ones(3), r"shape \(3,\)"), (torch.ones(1, 1, 1, 1, 1, 1), "shape"), ([[1.0]], "list")]
)
def test_weights_that_are_no_kernels_are_refused(weight, got):
    with pytest.raises(ValueError, match=rf"expected a weight of 2 \(linear\) to 5 \(3-D\) dimensions, got {got}"):
        conv_norm(weight, (5, 7))


def test_a_weight_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected a weight of shape \(4, 1, 3, 3\) .*got \(4, 4, 3, 3\); check"):
        ConvOperator(GEOMETRIES["depthwise"], torch.ones(4, 4, 3, 3))


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="expected out_channels divisible by groups, got out_channels=4 and groups=3; "
    ):
        conv_norm(torch.ones(4, 1, 3, 3), (5, 7), groups=3)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "auto"], ids=str)
def test_a_state_of_another_layer_is_refused_or_not_looked_at(method, device):
    """A vector of the wrong length must not be broadcast into a number."""
    geometry, other = GEOMETRIES["linear"], ConvGeometry(7, 11, (), ())
    operator = ConvOperator(geometry, gaussian(geometry).weight.to(device))
    state = operator_norm(ConvOperator(other, gaussian(other).weight.to(device)), method).state
    if state is None:
        assert operator_norm(operator, method).state is None
        return
    with pytest.raises(ValueError, match=r"expected the state .*, got .*; pass"):
        operator_norm(operator, method, state=state)


def test_a_state_that_is_no_vector_is_refused():
    with pytest.raises(ValueError, match=r"expected the state as a vector of shape \(5,\), got str; pass"):
        operator_norm(gaussian(GEOMETRIES["linear"]), PowerIteration(), state="state")


# Requests


@pytest.mark.parametrize("method", ["fourier", "Exact", "", None, FourierBound])
def test_a_method_that_is_none_is_refused(method):
    with pytest.raises(ValueError, match=r"expected method='auto' or a method such as FourierBound\(\), got "):
        operator_norm(gaussian(GEOMETRIES["dense"]), method)


@pytest.mark.parametrize("guarantee", ["none", "above", True])
def test_a_guarantee_that_is_none_is_refused(guarantee):
    with pytest.raises(ValueError, match=rf"expected guarantee in .*, got {guarantee!r}; "):
        operator_norm(gaussian(GEOMETRIES["dense"]), guarantee=guarantee)


@pytest.mark.parametrize(
    ("method", "guarantee"),
    [
        (PowerIteration(), "upper"),
        (PowerIteration(), "exact"),
        (PowerIteration(prove=True), "lower"),
        (FourierBound(), "exact"),
        (FourierBound(), "lower"),
        (GramIteration(), "exact"),
        (baselines.Miyato2018(), "upper"),
        (baselines.Singla2021(), "exact"),
        (baselines.Farnia2018(), "upper"),
    ],
    ids=str,
)
def test_a_guarantee_that_the_method_cannot_give_is_refused(method, guarantee):
    geometry = GEOMETRIES["pointwise" if method.supports(GEOMETRIES["pointwise"]) else "dense"]
    message = (
        f"expected a value that is '{guarantee}', got one that is .* from {type(method).__name__}.*; use method='auto'"
    )
    with pytest.raises(ValueError, match=message):
        operator_norm(gaussian(geometry), method, guarantee=guarantee)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "auto"], ids=str)
def test_a_geometry_that_the_method_does_not_support_is_refused_with_its_reason(method):
    odd = [
        *GEOMETRIES.values(),
        ConvGeometry(4, 4, (3, 3), None, padding=1, groups=4),
        ConvGeometry(2, 3, 3, (5, 7), padding=1, padding_mode="reflect"),
        ConvGeometry(2, 3, 3, (5, 7), padding=3, padding_mode="circular"),
    ]
    for geometry in odd:
        reason = method.why_not(geometry)
        assert method.supports(geometry) == (reason is None)
        if reason is not None:
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                operator_norm(gaussian(geometry), method)
            assert str(geometry) in reason or "got" in reason
            assert "; " in reason, f"no way out named: {reason}"


@pytest.mark.parametrize("ord", [0, 3, "fro", -math.inf, None])
def test_an_order_without_a_norm_is_refused(ord):
    with pytest.raises(ValueError, match=r"expected ord as 1, 2 or math\.inf, got .*; "):
        operator_norm(gaussian(GEOMETRIES["dense"]), ord=ord)


def test_an_exact_norm_of_any_size_is_refused():
    with pytest.raises(ValueError, match=r"expected .*input size|needs an input size"):
        operator_norm(gaussian(ConvGeometry(4, 4, (3, 3), None, groups=4)), guarantee="exact")


@pytest.mark.parametrize("other", [torch.ones(3, 3), torch.nn.Linear(3, 3), None])
def test_what_is_no_operator_is_refused(other):
    message = r"expected a ConvOperator, got .*; use conv_norm\(weight, input_size\) for a weight"
    with pytest.raises(ValueError, match=message):
        operator_norm(other)
    for pair in ((other, gaussian(GEOMETRIES["pointwise"])), (gaussian(GEOMETRIES["depthwise"]), other)):
        with pytest.raises(ValueError, match=message):
            joint_norm(*pair)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"groups": 2}, "expected groups=1 for a linear layer, got 2; describe it as a 1×1 convolution"),
        ({"stride": 2}, "expected no stride for a linear layer, which has no spatial dimensions, got 2"),
        ({"dilation": (2,)}, "expected no dilation for a linear layer"),
        ({"padding": 1}, "expected no padding for a linear layer"),
        ({"padding": [(1, 1)]}, "expected no padding for a linear layer"),
    ],
)
def test_a_linear_layer_does_not_swallow_the_options_of_a_convolution(option, message):
    """Two groups in a matrix of 4×3 would be another operator than the matrix."""
    with pytest.raises(ValueError, match=message):
        conv_norm(torch.ones(4, 3), None, **option)


# joint_norm


def test_layers_that_do_not_follow_each_other_are_refused():
    depthwise, pointwise = gaussian(GEOMETRIES["depthwise"]), gaussian(GEOMETRIES["pointwise"])
    with pytest.raises(ValueError, match=r"expected a pointwise layer of 4 input channels second, got .*; "):
        joint_norm(depthwise, pointwise)
    with pytest.raises(ValueError, match=r"expected a depthwise layer .* first, got .*; "):
        joint_norm(gaussian(GEOMETRIES["dense"]), pointwise)
    fitting = gaussian(ConvGeometry(4, 5, 1, (5, 7)))
    with pytest.raises(ValueError, match=r"expected a scale of shape \(4,\), got \(3,\); "):
        joint_norm(depthwise, fitting, scale=torch.ones(3))


@pytest.mark.parametrize("zero", ["depthwise", "pointwise", "scale"])
def test_a_joint_norm_of_zero(zero, device):
    operators = {"depthwise": gaussian(GEOMETRIES["depthwise"]), "pointwise": gaussian(ConvGeometry(4, 5, 1, (5, 7)))}
    operators = {k: replace(v, weight=v.weight.to(device) * (k != zero)) for k, v in operators.items()}
    scale = torch.ones(4, dtype=torch.float64, device=device) * (zero != "scale")
    assert float(joint_norm(*operators.values(), scale=scale)) == 0


def test_a_joint_norm_of_nan_is_refused(device):
    depthwise, pointwise = gaussian(GEOMETRIES["depthwise"]), gaussian(ConvGeometry(4, 5, 1, (5, 7)))
    scale = torch.tensor([1.0, math.nan, 1.0, 1.0])
    with pytest.raises(ValueError, match="finite"):
        joint_norm(depthwise, pointwise, scale=scale)
