"""Every law of laws.py, for every method, on random geometries: a new method is one line in METHODS."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch

import laws
import samplers
from cases import COUNT, Case, batches, case, supported
from opnorm import (
    ConvGeometry,
    ConvOperator,
    Exact,
    FourierBound,
    GramIteration,
    PowerIteration,
    conv_norm,
    joint_norm,
)
from opnorm.bound import Method
from opnorm.norms import baselines
from opnorm.norms.functional import operator_norm


@dataclass(frozen=True)
class Subject:
    """A method and what is to be known for testing it.

    Attributes:
        rtol: how well two of its computations agree where the law says that they do.
        silent: the laws that find nothing to check: no state to start from, no groups, no bound for every size.
        without: the laws that it breaks by design, and why.
        every: domination on each case (1) or on each `every`-th, for slow methods.
        count: how many cases for each of the other laws.
    """

    method: Method
    rtol: float = 1e-9
    silent: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    every: int = 1
    count: int = 40

    def __str__(self) -> str:
        return repr(self.method)


STATELESS = ("warm_start",)
MATRIX = ("group_maximum", "channels_of_the_maximum")
SOME_GROUPS = {"group_maximum": "it refines two of the groups, and every group when it is alone"}
LOOSE = {"finite_differences": "the gradient is that of the norm, and two squarings leave the bound far above it"}

METHODS = [
    Subject(FourierBound(), silent=STATELESS),
    Subject(FourierBound(refine=2), rtol=1e-3, silent=STATELESS, without=SOME_GROUPS),
    Subject(FourierBound(refine=64), rtol=1e-3, silent=STATELESS),
    Subject(FourierBound(tolerance=0.05), silent=STATELESS),
    Subject(FourierBound(finalists=None), silent=STATELESS),
    Subject(PowerIteration(), rtol=0.1, silent=("channels_of_the_maximum", "every_size")),
    Subject(PowerIteration(eps=1e-7), rtol=1e-3, silent=("channels_of_the_maximum", "every_size"), every=30, count=16),
    Subject(PowerIteration(prove=True), rtol=0.1, silent=MATRIX),
    Subject(GramIteration(), silent=(*STATELESS, *MATRIX)),
    Subject(GramIteration(steps=2), silent=(*STATELESS, *MATRIX), without=LOOSE),
    Subject(Exact(), silent=(*STATELESS, "channels_of_the_maximum")),
    Subject(Exact(dense=4), silent=(*STATELESS, "channels_of_the_maximum")),
]

SHORT = {"Ryu2019": {"steps": 3}, "Grishina2024": {"steps": 5}}  # their defaults are 100
# Only domination here: their other laws, with what each breaks by definition, are in test_baselines.
PUBLISHED = [Subject(getattr(baselines, name)(**SHORT.get(name, {}))) for name in baselines.__all__]
MINIMUM = 3  # operators on which a law has to find something to check


def check(law: laws.Law, subject: Subject, one: Case, device: torch.device) -> bool:
    """One law on one case, which the failure names."""
    try:
        return law(subject.method, one.operator(device=device), rtol=subject.rtol)
    except BaseException as error:
        error.add_note(f"{law.__name__} of {subject.method} on {one}")
        raise


def each(method: Method, chosen: Iterable[int]) -> list[Case]:
    return [one for one in map(case, chosen) if method.supports(one.geometry)]


@pytest.mark.parametrize("batch", batches(), ids=lambda b: f"{b[0]}-{b[-1]}")
@pytest.mark.parametrize("subject", [*METHODS, *PUBLISHED], ids=str)
@pytest.mark.parametrize("law", [laws.domination, laws.domination_in_float32], ids=lambda law: law.__name__)
def test_domination_on_every_case(law, subject, batch, device):
    for one in each(subject.method, batch[:: subject.every]):
        check(law, subject, one, device)


@pytest.mark.parametrize("subject", [*METHODS, *PUBLISHED], ids=str)
def test_every_method_supports_many_of_the_cases(subject):
    assert len(each(subject.method, range(COUNT))) >= 300


@pytest.mark.parametrize("subject", METHODS, ids=str)
@pytest.mark.parametrize("law", laws.LAWS.values(), ids=laws.LAWS)
def test_law(law, subject, device):
    if law.__name__ in subject.without:
        pytest.skip(subject.without[law.__name__])
    chosen = list(supported(subject.method.why_not, subject.count))
    checked = sum(check(law, subject, one, device) for one in chosen)
    if law.__name__ in subject.silent:
        assert checked == 0, "take the law off the list of silent ones"
    elif len(chosen) == subject.count:  # not a single case that was asked for
        assert checked >= MINIMUM


@pytest.mark.parametrize("guarantee", [None, "upper", "exact", "lower"])
@pytest.mark.parametrize("batch", batches(), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_auto_gives_what_was_asked_for_on_every_case(guarantee, batch, device):
    """And never a lower bound unless it was asked for."""
    for one in map(case, batch):
        operator = one.operator(device=device)
        bound = operator_norm(operator, guarantee=guarantee)
        assert bound.satisfies(guarantee or "upper"), one
        truth, value = laws.truth(operator), float(bound)
        assert bound.guarantee == "lower" or value >= truth * (1 - 1e-12), one
        assert bound.guarantee == "upper" or value <= truth * (1 + 1e-9), one


@pytest.mark.parametrize("subject", METHODS, ids=str)
def test_norms_that_are_known_without_computation(subject, device):
    known = samplers.known(torch.Generator().manual_seed(0))
    tried = 0
    for name, (drawn, norm) in known.items():
        assert laws.truth(drawn) == pytest.approx(norm, rel=1e-12), name
        if subject.method.supports(drawn.geometry):
            tried += 1
            operator = ConvOperator(drawn.geometry, drawn.weight.to(device))
            bound = operator_norm(operator, subject.method)
            if bound.guarantee != "lower":
                assert float(bound) >= norm * (1 - 1e-12), name
            if bound.guarantee != "upper":
                assert float(bound) <= norm * (1 + 1e-9), name
    assert tried or "Gram" in str(subject) or "prove" in str(subject)


@pytest.mark.parametrize("name", samplers.known(torch.Generator().manual_seed(0)))
def test_the_fourier_bound_is_the_norm_where_it_is_known_to_be(name, device):
    drawn, norm = samplers.known(torch.Generator().manual_seed(0))[name]
    bound = operator_norm(ConvOperator(drawn.geometry, drawn.weight.to(device)), FourierBound())
    assert float(bound) == pytest.approx(norm, rel=1e-4), name


# Steps


def test_steps_of_the_power_iteration_raise_its_value(device):
    steps = [PowerIteration(eps=1e-300, max_iter=n) for n in (1, 2, 4, 8, 16, 64)]
    for one in supported(steps[0].why_not, 60):
        assert laws.monotone(steps, one.operator(device=device), growing=True), one


def test_steps_of_the_gram_iteration_lower_its_value(device):
    steps = [GramIteration(steps=n) for n in (1, 2, 3, 4, 8, 12)]
    for one in supported(steps[0].why_not, 60):
        assert laws.monotone(steps, one.operator(device=device), growing=False), one


# Gradients


LAYERS = {
    "depthwise": ConvGeometry(3, 3, (3, 2), (5, 7), padding=1, groups=3),
    "strided": ConvGeometry(2, 2, 3, (5, 7), stride=2, padding=1, groups=2),
    "multiplier": ConvGeometry(2, 4, 3, (5, 7), stride=(1, 2), padding=1, groups=2),
    "transposed": ConvGeometry(2, 2, 3, (3, 5), stride=2, padding=1, groups=2, transposed=True),
    "circular": ConvGeometry(2, 2, 3, (5, 7), padding=1, padding_mode="circular", groups=2),
    "reflect": ConvGeometry(2, 2, 3, (5, 7), padding=1, padding_mode="reflect", groups=2),
    "dense": ConvGeometry(2, 3, 3, 7, padding=1),
    "pointwise": ConvGeometry(3, 5, (1, 1), (2, 3)),
    "linear": ConvGeometry(5, 3, (), ()),
}
DIFFERENTIABLE = [
    FourierBound(tolerance=1e-3),
    FourierBound(refine=64),
    PowerIteration(eps=1e-10, max_iter=10_000),
    GramIteration(),
    Exact(),
    Exact(dense=4),
]


GRADCHECKED = [(m, name) for m in DIFFERENTIABLE for name, g in LAYERS.items() if m.supports(g)]


@pytest.mark.parametrize(("method", "name"), GRADCHECKED, ids=str)
def test_gradcheck(method, name, device):
    """Every entry of the gradient against finite differences, to more digits than the law asks for."""
    geometry = LAYERS[name]
    weight = torch.randn(geometry.weight_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = weight.to(device).requires_grad_()

    def value(at: torch.Tensor) -> torch.Tensor:
        return operator_norm(ConvOperator(geometry, at), method).value

    assert torch.autograd.gradcheck(value, weight, eps=1e-5, atol=2e-4, rtol=1e-3)


# The functional form


@pytest.mark.parametrize("batch", batches(400), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_conv_norm_is_operator_norm_of_the_same_layer(batch, device):
    for one in map(case, batch):
        operator, g = one.operator(device=device), one.geometry
        names = ("stride", "padding", "dilation", "groups", "padding_mode", "transposed", "output_padding")
        options = {name: getattr(g, name) for name in names}
        value = conv_norm(operator.weight, g.input_size, guarantee="upper", **options)
        assert float(value) == float(operator_norm(operator, guarantee="upper")), one


@pytest.mark.parametrize("batch", batches(), ids=lambda b: f"{b[0]}-{b[-1]}")
def test_induced_norms_are_those_of_the_matrix(batch, device):
    """‖K‖_1 is the largest absolute column sum, ‖K‖_∞ the largest row sum; at any size they are upper bounds."""
    for one in map(case, batch):
        operator = one.operator(device=device)
        dense = operator.to_dense().abs()
        for ord, sums in ((1, dense.sum(0)), (float("inf"), dense.sum(1))):
            bound = operator_norm(operator, ord=ord)
            assert bound.guarantee == "exact"
            assert float(bound) == pytest.approx(float(sums.max()), rel=1e-12), one
            if ord == 1 and one.geometry.padding_mode != "zeros":
                continue  # how often padding reads an input depends on the size
            anywhere = operator_norm(ConvOperator(one.geometry.at(None), operator.weight), ord=ord)
            assert anywhere.satisfies("upper")
            assert float(anywhere) >= float(bound) * (1 - 1e-12), one


# Two layers at once


def depthwise_cases() -> list[Case]:
    """The cases with one input and one output a group."""
    return [one for one in map(case, range(COUNT)) if one.geometry.weight_shape[:2] == (one.geometry.groups, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_a_joint_norm_is_an_upper_bound_and_no_more_than_the_product(scaled, dtype, device):
    """‖PW∘S∘DW‖ by dense SVD, for every depthwise case, with random pointwise and linear layers behind it."""
    chosen, tighter = depthwise_cases(), 0
    assert len(chosen) >= 300
    for one in chosen:
        generator = torch.Generator().manual_seed(one.index)
        first, channels = one.operator(dtype, device), one.geometry.out_channels
        size = one.geometry.output_size
        second = (
            ConvGeometry(channels, 3, (1,) * len(size), size) if one.index % 2 else ConvGeometry(channels, 3, (), ())
        )
        matrix, scale = (torch.randn(n, channels, generator=generator, dtype=dtype).to(device) for n in (3, 1))
        last = ConvOperator(second, matrix.reshape(second.weight_shape))
        factors = scale[0] if scaled else None
        bound = joint_norm(first, last, scale=factors)
        mixed = matrix.double() * (factors.double() if scaled else 1)
        dense = first.to(torch.float64).to_dense().unflatten(0, (channels, -1))
        truth = float(torch.linalg.svdvals(torch.einsum("oc,cpi->opi", mixed, dense).flatten(0, 1))[0])
        product = laws.truth(first) * float(torch.linalg.matrix_norm(mixed, 2))
        assert bound.guarantee == "upper" and bound.value.dtype == dtype
        assert truth * (1 - 1e-12) <= float(bound), one
        tighter += float(bound) < 0.98 * product
        parts = [operator_norm(ConvOperator(ConvGeometry(channels, 3, (), ()), mixed)), operator_norm(first)]
        assert float(bound) <= math.prod(map(float, parts)) * (1 + 1e-5), one
        anywhere = ConvOperator(first.geometry.at(None), first.weight)
        if one.geometry.padding_mode == "zeros":
            assert float(joint_norm(anywhere, last, scale=factors)) >= truth * (1 - 1e-12), one
    assert tighter > len(chosen) / 4
