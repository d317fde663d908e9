"""Faults of other libraries, each shown on a small layer, and then shown to be absent here.

Each test computes the faulty number itself and first asserts that it is wrong: a trap that is none tests nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laws import truth
from opnorm import ConvGeometry, ConvOperator, Exact, FourierBound, GramIteration, PowerIteration, operator_norm
from opnorm.norms import baselines
from opnorm.norms.baselines import Grishina2024, Miyato2018

UPPER = [FourierBound(), FourierBound(refine=8), Exact()]
EVERY = [*UPPER, PowerIteration(), GramIteration(), *(getattr(baselines, name)() for name in baselines.__all__)]


def gaussian(geometry: ConvGeometry, seed: int = 0) -> ConvOperator:
    generator = torch.Generator().manual_seed(seed)
    return ConvOperator(geometry, torch.randn(geometry.weight_shape, generator=generator, dtype=torch.float64))


def depthwise(kernel: tuple[int, ...], size: tuple[int, ...], channels: int = 4, **options: object) -> ConvGeometry:
    padding = options.pop("padding", [k // 2 for k in kernel])
    return ConvGeometry(channels, channels, kernel, size, padding=padding, groups=channels, **options)  # type: ignore[arg-type]


def response_on_grid(weight: Tensor, grid: tuple[int, ...]) -> float:
    """max |DFT(θ)| on a grid, without any care: the kernel is cut off where the grid is smaller."""
    return float(torch.fft.fftn(weight, s=grid, dim=tuple(range(2, weight.dim()))).abs().max())


def on(operator: ConvOperator, device: torch.device) -> ConvOperator:
    return ConvOperator(operator.geometry, operator.weight.to(device))


def assert_bounds(operator: ConvOperator, device: torch.device, within: float = math.inf) -> None:
    """Our upper bounds are upper bounds, and not by a multiple."""
    norm = truth(operator)
    for method in UPPER:
        value = float(operator_norm(on(operator, device), method, guarantee="upper"))
        assert norm * (1 - 1e-12) <= value <= norm * within, f"{method}: {value} for a norm of {norm}"


@pytest.mark.parametrize(("kernel", "size"), [((7, 1), (5, 3)), ((1, 7), (3, 5))])
def test_tall_kernels_with_one_padding_for_both_axes(kernel, size, device):
    """The grid N + 2p of the other axis cuts the kernel off."""
    lowest = math.inf
    for seed in range(20):
        operator = gaussian(depthwise(kernel, size), seed)
        naive = response_on_grid(operator.weight, tuple(n + 2 * (min(kernel) // 2) for n in size))
        lowest = min(lowest, naive / truth(operator))
        assert_bounds(operator, device, within=2.2)
    assert lowest < 0.95


@pytest.mark.parametrize("kernel", [(7, 1), (1, 7), (5, 3), (3, 5)])
def test_tall_kernels_with_one_width_for_both_axes(kernel, device):
    """The kernel read as a square of its smaller side."""
    operator = gaussian(depthwise(kernel, (17, 13)))
    side = min(kernel)
    assert response_on_grid(operator.weight[:, :, :side, :side], (64, 64)) < 0.95 * truth(operator)
    assert_bounds(operator, device, within=1.06)
    for seed in range(20):
        assert_bounds(gaussian(depthwise(kernel, (3, 2)), seed), device)


def test_circular_grid_of_size_n_under_zero_padding(device):
    """max |DFT| on the N grid is the norm under circular padding, not under zero padding: an odd grid misses ω = π."""
    weight = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
    weight = torch.outer(weight, weight).expand(4, 1, 3, 3)
    operator = ConvOperator(depthwise((3, 3), (5, 5)), weight)
    naive = response_on_grid(weight, (5, 5))
    assert naive < 0.97 * truth(operator)
    assert_bounds(operator, device, within=1.05)
    circular = ConvOperator(depthwise((3, 3), (5, 5), padding_mode="circular"), weight)
    assert naive == pytest.approx(truth(circular), rel=1e-12)
    assert float(operator_norm(on(circular, device), FourierBound())) == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_groups_aggregated_by_a_product(factor, device):
    """The product of the groups' norms: below the truth where they are small, far above it where they are large."""
    geometry = ConvGeometry(6, 6, 3, (5, 7), padding=1, groups=3)
    operator = ConvOperator(geometry, factor * gaussian(geometry).weight)
    one = ConvGeometry(2, 2, 3, (5, 7), padding=1)
    alone = [truth(ConvOperator(one, part)) for part in operator.weight.chunk(3)]
    product = math.prod(alone)
    assert product < 0.6 * truth(operator) if factor < 1 else product > 10 * truth(operator)
    assert truth(operator) == pytest.approx(max(alone), rel=1e-12)
    assert_bounds(operator, device, within=1.2)


@pytest.mark.parametrize("size", [(4, 6), (8, 8), (14, 10), (7, 6)])
@pytest.mark.parametrize("padding", [((0, 1), (0, 1)), ((1, 1), (1, 1)), ((1, 0), (0, 1))])
def test_stride_2_on_even_sizes(size, padding, device):
    """The last window is cut off, and the unit-stride value is far too large: libraries raise, or return the latter."""
    geometry = depthwise((3, 3), size, stride=2, padding=padding)
    positive = ConvOperator(geometry, gaussian(geometry).weight.abs() + 0.5)
    unit_stride = response_on_grid(positive.weight, (64, 64))
    assert unit_stride > 1.5 * truth(positive)
    assert_bounds(positive, device, within=1.25)
    for seed in range(5):
        assert_bounds(gaussian(geometry, seed), device, within=1.5)


@pytest.mark.parametrize("stride", [1, 2])
def test_one_dominant_channel_among_many(stride, device):
    """σ of the reshaped kernel, which most libraries divide by, is ‖θ_c‖_F of that channel: 2.5 times too small."""
    geometry = depthwise((3, 3), (14, 14), channels=64, stride=stride)
    weight = 1e-3 * gaussian(geometry).weight
    weight[17] = 1 / 9  # an average
    operator = ConvOperator(geometry, weight)
    norm = truth(ConvOperator(depthwise((3, 3), (14, 14), channels=1, stride=stride), weight[17:18]))
    reshaped = float(operator_norm(operator, Miyato2018(n_power_iterations=100)))
    assert reshaped < (0.4 if stride == 1 else 0.75) * norm
    for method in UPPER:
        bound = operator_norm(on(operator, device), method, guarantee="upper")
        assert norm * (1 - 1e-12) <= float(bound) <= 1.05 * norm
        if bound.per_channel is not None:
            assert int(bound.per_channel.argmax()) == 17
            assert float(bound.per_channel[:17].max()) < 0.1 * norm


def test_groups_ignored(device):
    """A depthwise kernel read as a dense one of one input channel: every channel is added up."""
    operator = gaussian(depthwise((3, 3), (5, 7), channels=32))
    dense = ConvOperator(ConvGeometry(1, 32, 3, (5, 7), padding=1), operator.weight)
    assert truth(dense) > 2 * truth(operator)
    assert_bounds(operator, device, within=1.2)
    for method in EVERY:
        if method.supports(operator.geometry):
            bound = operator_norm(on(operator, device), method)
            assert bound.satisfies("upper") or float(bound) < truth(dense), method
            if bound.per_channel is not None:
                assert bound.per_channel.shape == (32,)


# Iterations that stop at a local optimum


def stuck() -> tuple[ConvOperator, Tensor]:
    """diag(1, 2) and a start that only sees the 1: every residual is zero from the beginning."""
    weight = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    return ConvOperator(ConvGeometry(2, 2, (), ()), weight), torch.tensor([1.0, 0.0], dtype=torch.float64)


def test_a_power_iteration_that_stops_at_a_local_optimum_is_not_called_a_bound(device):
    operator, start = stuck()
    operator, start = on(operator, device), start.to(device)
    bound = operator_norm(operator, PowerIteration(), state=start)
    assert float(bound) == pytest.approx(1.0)
    assert bound.guarantee == "lower"
    assert not bound.satisfies("upper")
    with pytest.raises(
        ValueError, match="expected a value that is 'upper', got one that is 'lower' from PowerIteration"
    ):
        operator_norm(operator, PowerIteration(), guarantee="upper", state=start)
    with pytest.raises(ValueError, match="expected a value that is 'exact', got one that is 'lower'"):
        operator_norm(operator, PowerIteration(), guarantee="exact", state=start)


def test_a_proof_notices_that_the_power_iteration_stopped_too_early(device):
    operator, start = stuck()
    bound = operator_norm(on(operator, device), PowerIteration(prove=True), state=start.to(device), guarantee="upper")
    assert float(bound) >= 2


def test_a_state_of_zeros_is_no_trap(device):
    operator, start = stuck()
    bound = operator_norm(on(operator, device), PowerIteration(), state=torch.zeros_like(start).to(device))
    assert float(bound) == pytest.approx(2.0, rel=1e-3)


def test_a_tensor_iteration_that_stops_at_a_local_optimum_is_not_called_a_bound(device):
    """‖K‖ ≤ √(k₁k₂)·‖θ‖_tensor needs the largest tensor norm, and an ascent may stop at a smaller one."""
    geometry = ConvGeometry(3, 3, 2, (16, 16), padding=1)
    lowest = 1.0
    for seed in range(30):
        operator = gaussian(geometry, seed)
        found = [float(operator_norm(on(operator, device), Grishina2024(seed=start))) for start in range(6)]
        lowest = min(lowest, min(found) / max(found))
    assert lowest < 0.97, "no start stopped at a local optimum, so that this shows nothing"
    assert operator_norm(operator, Grishina2024()).guarantee == "none"
    with pytest.raises(ValueError, match="expected a value that is 'upper', got one that is 'none' from Grishina2024"):
        operator_norm(operator, Grishina2024(), guarantee="upper")


ITERATIONS = [PowerIteration(), *(m for m in EVERY if hasattr(m, "seed"))]


@pytest.mark.parametrize("method", ITERATIONS, ids=repr)
def test_no_iteration_from_a_random_start_is_called_an_upper_bound(method, device):
    for geometry in (ConvGeometry(3, 5, (1, 1), (5, 7)), ConvGeometry(5, 3, (), ())):
        assert operator_norm(on(gaussian(geometry), device), method).guarantee in ("lower", "none")
    assert method.guarantee in ("lower", "none")


def test_auto_never_takes_an_iteration_for_a_bound(device):
    for geometry in (depthwise((3, 3), (5, 7)), ConvGeometry(3, 5, 1, (5, 7)), ConvGeometry(3, 5, 3, (5, 7), stride=2)):
        for guarantee in (None, "upper", "exact"):
            bound = operator_norm(on(gaussian(geometry), device), guarantee=guarantee)
            assert bound.guarantee in ("upper", "exact")
