"""Certificates: never below the truth, tighter than a product, refused with all reasons, for networks of any origin."""

from __future__ import annotations

import json
import math
import random
import statistics
import time

import pytest
import torch
from torch import nn

import network_cases as nets
import opnorm
import opnorm.models
import opnorm.normalize


def truth(model, shape, seed=0, linear=True, ord=2) -> float:
    """The norm of a linear network, or the largest Jacobian norm over many inputs."""
    generator = torch.Generator().manual_seed(seed)
    scales = (1.0,) if linear else (0.1, 0.3, 1.0, 1.0, 3.0, 3.0, 10.0)
    points = (scale * torch.randn(shape, dtype=torch.float64, generator=generator) for scale in scales)
    return max(nets.jacobian_norm(model, x, ord) for x in points)


def check(seed: int) -> tuple[float, float] | None:
    """One random network: the certificate dominates; ratios to the truth where it is linear and not zero."""
    linear, ord = seed % 2 == 0, {0: 1, 1: math.inf}.get(seed % 7, 2)
    model, shape = nets.random_network(seed, linear)
    certificate = opnorm.certify(model, shape, ord=ord, lower=False)
    least = truth(model, shape, seed, linear, ord)
    assert certificate.bound >= least * (1 - 1e-12), (seed, certificate.bound, least)
    assert certificate.product >= certificate.bound * (1 - 1e-12)
    assert all(row.guarantee in ("exact", "upper") for row in certificate.layers)
    return (certificate.bound / least, certificate.product / least) if linear and least > 0 else None


@pytest.mark.parametrize("block", range(4))
def test_the_certificate_of_a_random_network_dominates_the_truth(block):
    ratios = [r for r in map(check, range(80 * block, 80 * block + 80)) if r]
    assert statistics.median(r for r, _ in ratios) < 1.05 < 1.5 < statistics.median(p for _, p in ratios)


def separable_chain(rng: random.Random, pairs: int, channels: int, norm: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(pairs):
        layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
        if norm:
            layers.append(nn.BatchNorm2d(channels))
            with torch.no_grad():
                layers[-1].running_var.uniform_(0.2, 3)
                layers[-1].weight.normal_()
        wide = rng.choice((5, 7, 11, 13))
        layers.append(nn.Conv2d(channels, wide, 1))
        channels = wide
    return nn.Sequential(*layers).double().eval()


def converged_norm(model, shape) -> float:
    """‖J‖ of a linear network by Lanczos iteration."""
    from scipy.sparse.linalg import LinearOperator, svds

    x = torch.zeros(shape, dtype=torch.float64)
    out, pull = torch.func.vjp(lambda t: model(t[None])[0], x)

    def push(v):
        v = torch.as_tensor(v.reshape(shape))
        return torch.func.jvp(lambda t: model(t[None])[0], (x,), (v,))[1].detach().reshape(-1).numpy()

    operator = LinearOperator(
        (out.numel(), x.numel()),
        dtype="float64",
        matvec=push,
        rmatvec=lambda u: pull(torch.as_tensor(u.reshape(out.shape)))[0].detach().reshape(-1).numpy(),
    )
    return float(svds(operator, k=1, return_singular_vectors=False, tol=1e-4)[0])


def test_depthwise_then_pointwise_is_within_15_per_cent_where_the_product_is_not():
    rng, ratios, products = random.Random(0), [], []
    for seed in range(15):
        torch.manual_seed(seed)
        channels, size = rng.choice((5, 7, 11, 13)), (rng.choice((7, 11, 13)), rng.choice((11, 13, 17)))
        model = separable_chain(rng, pairs=1, channels=channels)
        certificate = opnorm.certify(model, (channels, *size), lower=False)
        exact = converged_norm(model, (channels, *size))
        assert certificate.bound >= exact * (1 - 1e-9)
        ratios.append(certificate.bound / exact)
        products.append(certificate.product / exact)
    assert statistics.median(ratios) < 1.03
    assert statistics.median(products) > 1.15


def test_chains_of_several_pairs_on_small_inputs_are_exact():
    rng, ratios, products = random.Random(1), [], []
    for seed in range(15):
        torch.manual_seed(seed)
        model = separable_chain(rng, pairs=rng.choice((2, 3)), channels=7)
        certificate = opnorm.certify(model, (7, 7, 11), lower=False)
        exact = converged_norm(model, (7, 7, 11))
        assert certificate.bound >= exact * (1 - 1e-9)
        ratios.append(certificate.bound / exact)
        products.append(certificate.product / exact)
    assert statistics.median(ratios) < 1.15 < 2 < statistics.median(products)


def test_a_residual_linear_map_is_one_convolution_on_any_input():
    torch.manual_seed(0)
    branch = nn.Conv2d(5, 5, 3, padding=1, groups=5, bias=False).double()
    with torch.no_grad():
        branch.weight.neg_()
        branch.weight[:, :, 1, 1] = -1.5  # I + A is much smaller than 1 + ‖A‖
    model = nets.Join("residual", nn.Identity(), branch)
    certificate = opnorm.certify(model, (5, 31, 37), lower=False)
    exact = converged_norm(model, (5, 31, 37))
    assert exact * (1 - 1e-9) <= certificate.bound <= exact * 1.01 < certificate.product / 1.5
    assert "one linear map" in str(certificate)


def test_constants_of_channels_pass_through_activations():
    """‖Θ·act·D‖ ≤ ‖Θ·diag(d)‖: one loud channel that the next layer does not listen to costs nothing."""
    depthwise = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False).double()
    pointwise = nn.Conv2d(3, 4, 1, bias=False).double()
    with torch.no_grad():
        depthwise.weight[1] *= 100
        pointwise.weight[:, 1] *= 0.01
    model = nn.Sequential(depthwise, nn.ReLU(), pointwise)
    certificate = opnorm.certify(model, (3, 9, 11), lower=False)
    assert certificate.bound < 0.1 * certificate.product
    assert certificate.bound >= truth(model, (3, 9, 11), linear=False)
    (row,) = [r for r in certificate.layers if r.name == "2"]
    assert row.saving > 0.9


def test_branches_on_separate_parts_do_not_pay_twice():
    halves = nets.Join(
        "split", nn.Linear(3, 3, bias=False), nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU())
    ).double()
    norms = [float(torch.linalg.matrix_norm(p.detach(), 2)) for p in halves.parameters()]
    assert opnorm.certify(halves, (6,), lower=False).bound == pytest.approx(max(norms), rel=1e-9)
    assert opnorm.certify(halves, (6,), lower=False, composition="product").bound == pytest.approx(
        math.hypot(*norms), rel=1e-9
    )


def test_permute_linear_permute_is_a_pointwise_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(6, 6, 7, padding=3, groups=6),
        nets.Apply(lambda x: x.permute(0, 2, 3, 1)),
        nn.Linear(6, 12),
        nets.Apply(lambda x: x.permute(0, 3, 1, 2)),
    ).double()
    certificate = opnorm.certify(model, (6, 29, 31), lower=False)
    exact = converged_norm(model, (6, 29, 31))
    assert exact * (1 - 1e-9) <= certificate.bound <= 1.05 * exact


def test_plain_products_are_the_product_of_the_operator_norms():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 9, 5)
    ).double()
    certificate = opnorm.certify(model, (2, 7, 7), composition="product", lower=False)
    norms = [
        float(opnorm.operator_norm(op, guarantee="upper")) for op in opnorm.operators_of(model, (2, 7, 7)).values()
    ]
    assert certificate.bound == pytest.approx(math.prod(norms), rel=1e-9)
    assert certificate.bound == certificate.product


def test_the_lower_bound_finds_the_norm_of_a_linear_network_and_stays_below():
    model, shape = nets.random_network(4, linear=True)
    certificate = opnorm.certify(model, shape, inputs=2, iterations=200)
    exact = truth(model, shape)
    assert certificate.lower == pytest.approx(exact, rel=1e-4)
    assert certificate.lower <= certificate.bound * (1 + 1e-12)
    assert certificate.ratio == certificate.bound / certificate.lower


def test_the_lower_bound_climbs_and_is_seeded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    start = 6 * torch.ones(1, 5, dtype=torch.float64)
    flat = opnorm.certify(model, (5,), inputs=start, ascent=0).lower
    steep = opnorm.certify(model, (5,), inputs=start, ascent=40)
    assert steep.lower > 1.5 * flat
    assert steep.lower == opnorm.certify(model, (5,), inputs=start, ascent=40).lower
    assert steep.lower <= steep.bound


@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_no_change_within_the_radius_changes_the_class(ord):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False)).double()
    certificate = opnorm.certify(model, (3,), ord=ord, lower=False)
    x = torch.randn(200, 3, dtype=torch.float64)
    logits = model(x)
    radius = certificate.radius(logits)
    top = logits.topk(2, -1)
    apart = {1: 1, 2: math.sqrt(2)}.get(ord, 2)
    torch.testing.assert_close(radius, (top.values[:, 0] - top.values[:, 1]) / (apart * certificate.bound))
    step = torch.randn(200, 3, dtype=torch.float64)
    step = step / torch.linalg.vector_norm(step, ord, dim=1, keepdim=True) * radius[:, None] * (1 - 1e-9)
    assert bool((model(x + step).argmax(-1) == logits.argmax(-1)).all())


def test_certified_accuracy_counts_right_and_safe():
    model = nn.Identity()
    model.register_parameter("p", nn.Parameter(torch.ones(())))
    certificate = opnorm.certify(model, (2,), lower=False)
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 0])
    loader = [(logits[:2], labels[:2]), (logits[2:], labels[2:])]
    assert certificate.certified_accuracy(model, loader, [0, 1.0, 2.0, 9.0]) == {
        0.0: 0.75,
        1.0: 0.5,
        2.0: 0.25,
        9.0: 0.0,
    }
    with pytest.raises(ValueError, match="at least one batch"):
        certificate.certified_accuracy(model, [], [0])
    for logits in (torch.ones(3, 1), torch.ones(()), [1.0, 2.0]):
        with pytest.raises(ValueError, match="two classes"):
            certificate.radius(logits)
    for epsilons in (0.5, [-1.0], [math.nan]):
        with pytest.raises(ValueError, match="epsilons as numbers of at least 0"):
            certificate.certified_accuracy(model, loader, epsilons)


@pytest.mark.parametrize("scaling", ["hard", "soft"])
@pytest.mark.parametrize("K", [0.7, 3.0])
def test_a_network_trained_at_K_has_no_more_than_K_promises(K, scaling):
    """Layers K; residual 1 + K²; pooling with overlapping windows 2."""
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nets.Join("residual", nn.Identity(), branch),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8),
        nn.Conv2d(8, 6, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    )
    normalizer = opnorm.normalize.Normalizer(model, (1, 16, 16), K=K, scaling=scaling, guarantee="upper")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(64, 1, 16, 16), torch.randint(0, 5, (64,))
    promise = K * (1 + K * K) * 2 * K * K * K
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        normalizer.step()
    for composition in ("merged", "product"):
        certificate = opnorm.certify(model, (1, 16, 16), composition=composition, inputs=1, ascent=0)
        assert certificate.lower <= certificate.bound <= promise * (1 + 1e-6)
    assert scaling == "soft" or certificate.bound >= 0.9 * promise


def test_any_size_is_bounded_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nets.Join("residual", nn.Identity(), nn.Conv2d(4, 4, 3, padding=1)),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()
    free = opnorm.certify(model, (1, None, None), lower=False)
    for size in ((16, 16), (17, 23), (40, 31)):
        assert opnorm.certify(model, (1, *size), lower=False).bound <= free.bound
        assert truth(model, (1, *size), linear=False) <= free.bound
    assert "any" in str(free) and free.sizes == "dimension 1 from 3 up, dimension 2 from 3 up"


def test_a_network_of_one_size_is_not_certified_for_all():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 92 * 126, 2))
    with pytest.raises(ValueError, match=r"any size|trace"):
        opnorm.certify(model, (1, None, None))


def test_several_outputs_are_one_vector_or_one_of_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x).relu()}

    model = Two().double()
    bounds = [opnorm.certify(model, (3,), output=i, lower=False).bound for i in (0, 1)]
    both = opnorm.certify(model, (3,))
    assert bounds[0] == pytest.approx(float(torch.linalg.matrix_norm(model.a.weight.detach(), 2)), rel=1e-9)
    assert max(bounds) <= both.bound <= math.hypot(*bounds) * (1 + 1e-9)
    assert both.lower <= both.bound
    with pytest.raises(ValueError, match="below 2"):
        opnorm.certify(model, (3,), output=2)


def test_all_refusals_come_at_once_with_their_places():
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())
    model = nn.Sequential(block, nn.Linear(4, 4), nets.Apply(lambda x: x * x), nn.LayerNorm(4))
    with pytest.raises(ValueError, match="without one") as error:
        opnorm.certify(model, (4,))
    text = str(error.value)
    assert "0.1" in text and "3" in text and "layer_norm" in text and "mul" in text and "lipschitz_rule" in text


def test_the_time_of_every_stage_is_shown():
    certificate = opnorm.certify(nn.Linear(3, 2), (3,))
    stages = ["export", "interpretation", "norms", "table", "lower bound"]
    assert list(certificate.times) == stages and all(t >= 0 for t in certificate.times.values())
    (line,) = [line for line in str(certificate).splitlines() if line.startswith("time: ")]
    assert all(f"{stage} {certificate.times[stage]:.2f} s" in line for stage in stages)


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", [False, True])
def test_mobilenet_on_224_pixels_takes_less_than_ten_seconds(batch_norm):
    """Of one core, which other processes do not change as they change the time on the clock."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        certificate = opnorm.certify(opnorm.models.mobilenet_v2(batch_norm=batch_norm), (3, 224, 224))
        assert time.process_time() - start < 10
    finally:
        torch.set_num_threads(threads)
    assert 0 < certificate.lower <= certificate.bound < certificate.product


def test_modes_and_gradients_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    model[1].eval()
    opnorm.certify(model, (3,))
    assert model.training and model[0].training and not model[1].training and model[2].training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": ()}, "positive integers"),
        ({"input_shape": (0,)}, "positive integers"),
        ({"input_shape": (2.5,)}, "positive integers"),
        ({"input_shape": (True,)}, "positive integers"),
        ({"input_shape": 3}, "positive integers"),
        ({"input_shape": "3"}, "positive integers"),
        ({"ord": 3}, "ord as"),
        ({"composition": "sum"}, "composition as"),
        ({"inputs": torch.zeros(2, 5)}, "inputs of shape"),
        ({"inputs": torch.zeros(0, 3)}, "at least one input"),
        ({"input_shape": (4,)}, "torch.export can trace"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        opnorm.certify(nn.Linear(3, 2), **({"input_shape": (3,)} | arguments))


def test_broken_weights_are_named():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"0\.weight"):
        opnorm.certify(model, (3,))
    with pytest.raises(ValueError, match="meta device"):
        opnorm.certify(nn.Linear(3, 2, device="meta"), (3,))
    with pytest.raises(ValueError, match=r"nn\.Module"):
        opnorm.certify(torch.relu, (3,))


@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e150])
def test_very_small_and_very_large_weights(scale):
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    plain = opnorm.certify(model, (3,), lower=False).bound
    with torch.no_grad():
        model[0].weight *= scale
    assert opnorm.certify(model, (3,), lower=False).bound == pytest.approx(scale * plain, rel=1e-9)


def test_a_thousand_layers_are_no_problem():
    model = nn.Sequential(
        *(nets.Join("residual", nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())) for _ in range(300))
    )
    assert math.isfinite(opnorm.certify(model, (2,), lower=False).bound)
    deep = nn.Sequential(*(m for _ in range(500) for m in (nn.Linear(2, 2), nn.Tanh())))
    assert opnorm.certify(deep, (2,), lower=False).bound > 0


def test_the_certificate_as_json_and_text():
    model, shape = nets.random_network(3, linear=False)
    certificate = opnorm.certify(model, shape, inputs=1)
    content = json.loads(certificate.to_json())
    assert content["bound"] == certificate.bound and content["lower"] == certificate.lower
    assert content["input_shape"] == list(shape) and content["ord"] == 2
    assert [row["name"] for row in content["layers"]] == [row.name for row in certificate.layers]
    assert set(content["times"]) == {"export", "interpretation", "norms", "table", "lower bound"}
    shown = float(str(certificate).split("≤ ")[1].split()[0])
    assert certificate.bound <= shown <= certificate.bound * 1.00001
    assert certificate.layers[-1].total == pytest.approx(certificate.bound, rel=1e-9)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_the_shares_along_a_chain_make_up_the_bound(seed):
    torch.manual_seed(seed)
    layers = []
    for kind in random.Random(seed).choices((nn.ReLU, nn.Tanh, None), k=4):
        layers += [
            nn.Conv1d(4, 4, 3, padding=1, groups=4),
            nn.BatchNorm1d(4),
            nn.Conv1d(4, 4, 1),
            *([kind()] if kind else []),
        ]
    certificate = opnorm.certify(nn.Sequential(*layers).double(), (4, 11), lower=False)
    assert math.prod(row.value for row in certificate.layers) == pytest.approx(certificate.bound, rel=1e-9)
    assert all(0 <= row.saving < 1 for row in certificate.layers)


def test_plotting(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    model, shape = nets.random_network(3, linear=False)
    figure = opnorm.certify(model, shape, lower=False).plot()
    figure.savefig(tmp_path / "certificate.png")
    assert (tmp_path / "certificate.png").stat().st_size > 1000
