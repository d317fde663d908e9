"""`screening`: the largest channel of many depthwise layers, as if every channel had been looked at closely."""

from __future__ import annotations

import pytest
import torch

from opnorm import ConvGeometry, ConvOperator, FourierBound
from opnorm.normalize.screening import Form, coarse_bounds, largest

METHOD = FourierBound(tolerance=5e-3, finalists=None)
GEOMETRIES = [
    ConvGeometry(13, 13, 3, (17, 11), padding=1, groups=13),
    ConvGeometry(13, 13, 3, (17, 11), padding=1, groups=13, stride=2),
    ConvGeometry(29, 29, 3, (17, 11), padding=1, groups=29),
    ConvGeometry(13, 13, 3, (7, 5), padding=1, groups=13),
    ConvGeometry(5, 15, 3, (17, 11), padding=1, groups=5),  # three kernels a channel
    ConvGeometry(7, 7, (5, 1), (13, 11), padding=(2, 0), groups=7, stride=(3, 1), dilation=(2, 1)),
    ConvGeometry(11, 11, 4, (23,), padding=2, groups=11, stride=2),
    ConvGeometry(3, 3, 3, (7, 5, 6), padding=1, groups=3, stride=(1, 2, 1)),
    ConvGeometry(13, 13, 3, (17, 11), padding=1, groups=13, padding_mode="circular"),
]


def weights_of(geometries: list[ConvGeometry], dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    return [scale * torch.randn(g.weight_shape, dtype=torch.float64).to(dtype) for g in geometries]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e15])
def test_it_finds_what_a_close_look_at_every_channel_finds(dtype: torch.dtype, scale: float) -> None:
    """All at once, layers of several grids and sizes stacked in another order than they are given in."""
    geometries = [*GEOMETRIES, *reversed(GEOMETRIES)]
    weights = weights_of(geometries, dtype, scale)
    found = largest([Form.of(g, METHOD.grids(g)) for g in geometries], weights)
    for geometry, weight, value in zip(geometries, weights, found, strict=True):
        expected = METHOD.compute(ConvOperator(geometry, weight)).value
        assert value.dtype == expected.dtype
        assert float(value) == pytest.approx(float(expected), rel=1e-5 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_look_is_never_below_the_close_one(geometry: ConvGeometry, dtype: torch.dtype) -> None:
    """Nor more than a quarter above what holds for inputs of every size, in three dimensions."""
    form = Form.of(geometry, METHOD.grids(geometry))
    for _ in range(20):
        (weight,) = weights_of([geometry], dtype)
        first = coarse_bounds(weight.reshape(form.channels, form.members, -1), form.coarse)
        close = METHOD.compute(ConvOperator(geometry, weight.double())).per_channel
        any_size = METHOD.compute(ConvOperator(geometry.at(None), weight.double())).per_channel
        assert close is not None and any_size is not None
        assert (first.double() >= close / 1.005).all()  # which takes a grid for every size where that is smaller
        assert (first.double() <= 1.25 * any_size).all()


def test_weights_without_a_norm_are_seen() -> None:
    """A NaN in one of many channels makes the norm of its layer a NaN, and of no other."""
    geometries = [ConvGeometry(31, 31, 3, (9, 9), padding=1, groups=31)] * 3
    weights = weights_of(geometries, torch.float32)
    weights[1][17, 0, 2, 1] = float("nan")
    weights[2].zero_()
    found = torch.stack(largest([Form.of(g, METHOD.grids(g)) for g in geometries], weights))
    assert found.isnan().tolist() == [False, True, False]
    assert found[2] == 0
