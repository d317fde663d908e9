"""Each rule against the truth: slopes found numerically, dense SVD of linear maps, inputs that attain the constant."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import network_cases as nets
import opnorm
from opnorm import rules

ORDS = (1, 2, math.inf)


def bound(function, shape, ord=2, **options) -> float:
    module = function if isinstance(function, nn.Module) else nets.Apply(function)
    return opnorm.certify(module.double(), shape, ord=ord, lower=False, **options).bound


def dense_norm(function, shape, ord=2) -> float:
    """The norm of x ↦ f(x) - f(0), column by column."""
    units = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, 1, *shape)
    origin = function(torch.zeros(1, *shape, dtype=torch.float64))
    columns = torch.stack([(function(unit) - origin).reshape(-1) for unit in units], 1)
    return float(torch.linalg.matrix_norm(columns, ord))


SLOPES = {
    "relu": (F.relu, 1.0),
    "relu6": (F.relu6, 1.0),
    "leaky": (lambda x: F.leaky_relu(x, 0.2), 1.0),
    "steep leaky": (lambda x: F.leaky_relu(x, -1.7), 1.7),
    "elu": (lambda x: F.elu(x, 2.5), 2.5),
    "elu below 1": (lambda x: F.elu(x, 0.3), 1.0),
    "selu": (F.selu, 1.758099),
    "celu": (lambda x: F.celu(x, 0.7), 1.0),
    "gelu": (F.gelu, 1.128904),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), 1.128993),
    "silu": (F.silu, 1.099839),
    "mish": (F.mish, 1.088498),
    "softplus": (lambda x: F.softplus(x, beta=3), 1.0),
    "sigmoid": (torch.sigmoid, 0.25),
    "logsigmoid": (F.logsigmoid, 1.0),
    "tanh": (torch.tanh, 1.0),
    "hardtanh": (lambda x: F.hardtanh(x, -2, 3), 1.0),
    "hardswish": (F.hardswish, 1.5),
    "hardsigmoid": (F.hardsigmoid, 1 / 6),
    "softshrink": (F.softshrink, 1.0),
    "abs": (torch.abs, 1.0),
    "sin": (torch.sin, 1.0),
    "cos": (torch.cos, 1.0),
    "atan": (torch.atan, 1.0),
    "asinh": (torch.asinh, 1.0),
    "erf": (torch.erf, 2 / math.sqrt(math.pi)),
    "clamp": (lambda x: x.clamp(-1, 2), 1.0),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.5), 1.0),
    "rrelu": (lambda x: F.rrelu(x, 1.0, 2.0, training=False), 1.5),
    "leaky by hand": (lambda x: torch.maximum(x, 0.3 * x), 1.0),
}


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("ord", ORDS)
def test_the_constant_of_an_activation_is_its_largest_slope(name, ord):
    function, expected = SLOPES[name]
    x = torch.cat([torch.linspace(-12, 12, 240_001, dtype=torch.float64), torch.tensor([3 - 1e-12])]).requires_grad_()
    (slopes,) = torch.autograd.grad(function(x).sum(), x)
    steepest = float(slopes.abs().max())
    constant = bound(function, (3, 5), ord)
    assert constant == pytest.approx(expected, rel=1e-5)
    assert steepest * (1 - 1e-15) <= constant <= steepest * (1 + 2e-5)


def test_prelu_has_a_constant_a_channel_that_is_folded_into_its_neighbour():
    prelu = nn.PReLU(3)
    prelu.weight.data = torch.tensor([0.1, -4.0, 1.0])
    assert bound(prelu, (3, 2)) == pytest.approx(4.0)
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.data = torch.tensor([[1.0, 0.01, 0.0], [0.0, 0.0, 1.0]])
    model = nn.Sequential(prelu, linear)
    assert bound(model, (3,)) == pytest.approx(math.hypot(1, 0.04), rel=1e-9)
    assert bound(model, (3,), composition="product") > 4


@pytest.mark.parametrize(("ord", "n"), [(1, 5), (2, 5), (math.inf, 5), (2, 2), (2, 1)])
def test_softmax_and_log_softmax_attain_their_constants(ord, n):
    x = torch.full((n,), -60.0, dtype=torch.float64)
    x[: min(n, 2)] = 0  # p = (1/2, 1/2, 0, ...)
    truth = nets.jacobian_norm(lambda t: t.softmax(-1), x, ord)
    assert bound(lambda t: t.softmax(-1), (n,), ord) == pytest.approx(truth, abs=1e-12)
    x[1:] = -60
    truth = nets.jacobian_norm(lambda t: t.log_softmax(-1), x, ord)
    assert bound(lambda t: t.log_softmax(-1), (n,), ord) == pytest.approx(truth, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_no_softmax_of_random_probabilities_is_steeper_than_a_half(seed):
    p = torch.distributions.Dirichlet(torch.full((2 + seed,), 0.3, dtype=torch.float64)).sample((2000,))
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    for ord in ORDS:
        assert float(torch.linalg.matrix_norm(jacobian, ord).max()) <= 0.5 + 1e-15


MATRIX = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
LINEAR = {
    "average": (lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 7, 11)),
    "average, borders": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 8, 5)),
    "average, ceil": (lambda x: F.avg_pool2d(x, (2, 3), (2, 2), (1, 1), ceil_mode=True), (1, 6, 5)),
    "average, divisor": (lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3), (1, 4, 5)),
    "average 1-D": (lambda x: F.avg_pool1d(x, 4, 2, 1), (3, 13)),
    "average 3-D": (lambda x: F.avg_pool3d(x, (2, 3, 1), (1, 2, 1)), (1, 4, 5, 3)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (2, 7, 5)),
    "adaptive, larger": (lambda x: F.adaptive_avg_pool1d(x, 7), (2, 3)),
    "global": (lambda x: F.adaptive_avg_pool3d(x, 1), (2, 3, 4, 2)),
    "nearest": (lambda x: F.interpolate(x, size=(7, 3), mode="nearest"), (2, 4, 5)),
    "nearest-exact": (lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), (1, 4, 5)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 4, 5)),
    "bilinear, corners": (lambda x: F.interpolate(x, size=(9, 2), mode="bilinear", align_corners=True), (1, 4, 5)),
    "trilinear": (lambda x: F.interpolate(x, size=(3, 5, 2), mode="trilinear"), (1, 2, 3, 4)),
    "bicubic": (lambda x: F.interpolate(x, size=(9, 7), mode="bicubic"), (1, 4, 5)),
    "antialiased": (lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), (1, 7, 5)),
    "linear": (lambda x: F.interpolate(x, size=11, mode="linear"), (2, 5)),
    "pad zeros": (lambda x: F.pad(x, (1, 2, 0, 1)), (2, 3, 4)),
    "pad reflect": (lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), (2, 3, 4)),
    "pad replicate": (lambda x: F.pad(x, (3, 1, 0, 2), mode="replicate"), (2, 3, 4)),
    "pad circular": (lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"), (2, 3, 4)),
    "pad channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), (2, 3, 4)),
    "shuffle": (nn.PixelShuffle(2), (4, 3, 2)),
    "unshuffle": (nn.PixelUnshuffle(2), (1, 4, 6)),
    "expand": (lambda x: x[:, :1].expand(-1, 5, -1), (2, 3)),
    "repeat": (lambda x: x.repeat(1, 2, 3), (2, 3)),
    "interleave": (lambda x: x.repeat_interleave(3, 1), (2, 3)),
    "index": (lambda x: x[:, [0, 0, 2, 1, 0]], (3, 2)),
    "index_select": (lambda x: torch.index_select(x, 1, torch.tensor([1, 1])), (3, 2)),
    "unfold": (lambda x: x.unfold(1, 3, 1), (7,)),
    "im2col": (lambda x: F.unfold(x, 2), (2, 3, 4)),
    "slice": (lambda x: x[:, ::2, 1:], (5, 4)),
    "select": (lambda x: x[:, -1], (5, 4)),
    "flip and roll": (lambda x: x.flip(1).roll(2, -1), (5, 4)),
    "tril": (lambda x: torch.tril(x), (3, 4)),
    "mean": (lambda x: x.mean((1, 2)), (3, 4, 2)),
    "mean of all": (lambda x: x.mean()[None], (3, 4)),
    "sum": (lambda x: x.sum(-1), (3, 4)),
    "scaled": (lambda x: 3 - 2 * x / 7, (3, 4)),
    "where": (lambda x: torch.where(torch.tensor([True, False]), x, 2 * x), (3, 2)),
    "masked": (lambda x: x.masked_fill(torch.tensor([True, False, False]), 0.0), (2, 3)),
    "both halves": (lambda x: torch.cat([2 * x[:, :2], -x[:, 2:]], 1), (4, 3)),
    "stack": (lambda x: torch.stack([x, 3 * x], 2), (2, 3)),
    "zeros and ones of its shape": (lambda x: torch.cat([torch.zeros_like(x), x - x.new_ones(4, 3)], 1), (4, 3)),
    "a shape of its own": (lambda x: x * (torch.full_like(x, 2) + x.new_zeros(x.shape)), (4, 3)),
    "dropout of a constant": (lambda x: x * F.dropout(torch.full((3,), 2.0), 0.5, training=False), (4, 3)),
    "broadcast": (lambda x: x[:, :1] + 0.5 * x, (4, 3)),
    "x - x": (lambda x: x - x, (3, 2)),
    "matrices": (lambda x: MATRIX @ x @ MATRIX[:, :2].T, (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("ord", ORDS)
def test_a_linear_operation_has_its_exact_norm(name, ord):
    function, shape = LINEAR[name]
    truth = dense_norm(function, shape, ord)
    found = bound(function, shape, ord)
    assert found >= truth * (1 - 1e-13)
    loose = {"broadcast", "x - x", "both halves", "matrices", "stack"} if ord != 2 else set()
    if name not in loose:
        assert found == pytest.approx(truth, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(3, 2, 1, 1, False), (2, 2, 0, 1, False), (3, 1, 1, 2, False), (2, 3, 1, 1, True), (5, 2, 2, 1, False)],
)
def test_max_pooling_attains_the_root_of_the_number_of_windows(kernel, stride, padding, dilation, ceil, ord):
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
    size = (9, 11)
    most = 0.0
    for i in range(size[0]):  # a spike is the maximum of all windows that it lies in
        for j in range(size[1]):
            x = torch.rand((1, *size), dtype=torch.float64)
            x[0, i, j] = 5
            e = torch.zeros_like(x)
            e[0, i, j] = 1
            _, y = torch.func.jvp(lambda t: pool(t[None])[0], (x,), (e,))
            most = max(most, float(torch.linalg.vector_norm(y, ord)))
    assert bound(pool, (1, *size), ord) == pytest.approx(most, rel=1e-12)


def test_adaptive_max_pooling_counts_overlapping_windows():
    assert bound(nn.AdaptiveMaxPool1d(3), (2, 4)) == pytest.approx(math.sqrt(2))
    assert bound(nn.AdaptiveMaxPool1d(2), (2, 4)) == pytest.approx(1)


def maxmin(x):
    a, b = x.chunk(2, 1)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def group_sort(x):
    return x.unflatten(1, (-1, 3)).sort(2).values.flatten(1, 2)


def by_reduction(x):
    pairs = x.unflatten(1, (-1, 2))
    return torch.stack([pairs.amax(2), pairs.amin(2)], 2).flatten(1, 2)


def by_max_dim(x):
    pairs = x.unflatten(1, (-1, 2))
    return torch.cat([pairs.max(2).values, pairs.min(2).values], 1)


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize("function", [maxmin, group_sort, by_reduction, by_max_dim, lambda x: x.sort(1).values])
def test_sorting_is_1_lipschitz_however_it_is_written(function, ord):
    assert bound(function, (6, 4), ord) == pytest.approx(1, abs=1e-12)


def test_a_maximum_of_two_branches_counts_both():
    assert bound(lambda x: torch.maximum(x, 1 - x), (3, 2)) == pytest.approx(1)
    a = nn.Linear(3, 3, bias=False).double()
    found = bound(nets.Join("extremum", nn.Identity(), a), (3,))
    assert found == pytest.approx(math.hypot(1, torch.linalg.matrix_norm(a.weight.detach(), 2)), rel=1e-9)


REFUSED = {
    "layer norm": (nn.LayerNorm(4), "standard deviation"),
    "group norm": (nn.GroupNorm(2, 4), "standard deviation"),
    "instance norm": (nn.InstanceNorm1d(4), "standard deviation"),
    "batch norm without statistics": (nn.BatchNorm1d(4, track_running_stats=False), "statistics of its input"),
    "product": (lambda x: x * torch.sigmoid(x), "product of two"),
    "attention": (lambda x: torch.softmax(x @ x.mT, -1) @ x, "product of two"),
    "attention, fused": (lambda x: F.scaled_dot_product_attention(x, x, x), "product of two"),
    "quotient": (lambda x: x / (1 + x.abs()), "quotient of two"),
    "1/x": (lambda x: 1 / x, "no bound"),
    "square": (lambda x: x**2, "no bound"),
    "exp": (torch.exp, "no bound"),
    "sqrt": (torch.sqrt, "no bound"),
    "softplus that jumps": (lambda x: F.softplus(x, threshold=1), "jumps"),
    "product with constant matrices": (lambda x: torch.bmm(x[None, 0], MATRIX.new_ones(1, 4, 2)), "constant matrix of"),
    "random weights": (lambda x: x @ torch.rand(4, 3, dtype=torch.float64), "random"),
    "random mask": (lambda x: x * F.dropout(torch.ones(4, dtype=torch.float64), 0.5, training=True), "random"),
    "threshold that jumps": (lambda x: F.threshold(x, 0.5, 0.0), "jumps"),
    "rounding to integers": (lambda x: x.to(torch.int32).double(), "jumps"),
    "order of a sort": (lambda x: x.sort(1).indices.double(), "jumps"),
    "argmax used": (lambda x: x + x.max(1, keepdim=True).indices, "jumps"),
    "condition on the input": (lambda x: torch.where(x > 0, x, -x), "no rule"),
    "no rule": (lambda x: torch.special.bessel_j0(x), "no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_constant_is_refused_with_the_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        bound(function, (4, 4))


def test_in_place_operations_are_seen():
    def later(x):
        y = 2 * x
        z = y[:, :2]
        z.mul_(5)
        return y

    assert bound(later, (4, 3)) == pytest.approx(10, rel=1e-8)
    assert bound(nn.Sequential(nn.Linear(3, 3), nn.ReLU6(inplace=True)), (3,)) > 0


@pytest.mark.parametrize("dropout", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_in_eval_mode_is_its_argument_which_an_in_place_operation_changes(dropout):
    def residual(x):
        y = 2 * x
        z = dropout(y, 0.5, False)
        z.mul_(3)
        return y + z

    assert bound(residual, (4, 3)) == pytest.approx(12, rel=1e-8)


def test_a_rule_of_ones_own_and_no_second_one():
    operation = torch.ops.aten.sinc.default

    @opnorm.lipschitz_rule(operation)
    def sinc(call):
        return 1.3705

    try:
        with pytest.raises(ValueError, match="without a rule"):
            opnorm.lipschitz_rule(operation)(lambda call: 1.0)
        assert bound(torch.sinc, (3,)) == pytest.approx(1.3705)
        with pytest.raises(ValueError, match="without a rule"):
            opnorm.lipschitz_rule(torch.ops.aten.relu.default)(sinc)
    finally:
        assert rules.forget(operation) is sinc
    with pytest.raises(ValueError, match="no rule"):
        bound(torch.sinc, (3,))


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, "one", None, True])
def test_a_rule_that_returns_nonsense_is_told_so(wrong):
    operation = torch.ops.aten.sinc.default
    opnorm.lipschitz_rule(operation)(lambda call: wrong)
    try:
        with pytest.raises(ValueError, match="Lipschitz constant"):
            bound(torch.sinc, (3,))
    finally:
        rules.forget(operation)


def test_an_elementwise_rule_lets_channel_constants_through():
    operation = torch.ops.aten.sinc.default
    opnorm.lipschitz_rule(operation)(lambda call: rules.Elementwise(1.3705, call.operand.ndim))
    try:
        model = nn.Sequential(nn.PReLU(2, init=3.0), nets.Apply(torch.sinc), nn.Linear(2, 2)).double()
        model[0].weight.data = torch.tensor([3.0, 1.0], dtype=torch.float64)
        expected = 1.3705 * torch.linalg.matrix_norm(model[2].weight.detach() * torch.tensor([3.0, 1.0]), 2)
        assert bound(model, (2,)) == pytest.approx(float(expected), rel=1e-9)
    finally:
        rules.forget(operation)
