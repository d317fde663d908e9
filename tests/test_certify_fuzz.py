"""Random graphs: always a bound, and never one below the truth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import network_cases as nets
import opnorm

ORDS = st.sampled_from((1, 2, 2, 2, math.inf))


def dominates(seed: int, linear: bool, ord: float, composition: str) -> None:
    model, shape = nets.random_network(seed, linear)
    certificate = opnorm.certify(model, shape, ord=ord, lower=False, composition=composition)
    generator = torch.Generator().manual_seed(seed)
    for scale in (1.0,) if linear else (0.1, 1.0, 1.0, 4.0):
        x = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
        least = nets.jacobian_norm(model, x, ord)
        assert certificate.bound >= least * (1 - 1e-12), (seed, linear, ord, certificate.bound, least)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31), st.booleans(), ORDS, st.sampled_from(("merged", "merged", "product")))
def test_no_bound_of_a_random_graph_is_below_the_truth(seed, linear, ord, composition):
    dominates(seed, linear, ord, composition)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31), st.booleans(), ORDS, st.sampled_from(("merged", "merged", "product")))
def test_no_bound_of_a_thousand_random_graphs_is_below_the_truth(seed, linear, ord, composition):
    dominates(seed, linear, ord, composition)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31), st.floats(-2, 2).filter(lambda c: abs(c) > 1e-3))
def test_scaling_a_network_scales_its_bound(seed, factor):
    model, shape = nets.random_network(seed, linear=True)
    scaled = torch.nn.Sequential(model, nets.Apply(lambda x: factor * x)).double()
    bound = opnorm.certify(model, shape, lower=False).bound
    assert opnorm.certify(scaled, shape, lower=False).bound == pytest.approx(abs(factor) * bound, rel=1e-4, abs=1e-12)
