"""`Normalizer` beside optimizers, mixed precision, compilers, averages, checkpoints and export."""

from __future__ import annotations

import copy
import io
import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint_sequential

from opnorm import ConvOperator
from opnorm.layers import operators_of
from opnorm.models import ds_convnet
from opnorm.normalize import Normalizer

SHAPE = (1, 8, 8)
EPS = 0.01


def true_norms(model: nn.Module, shape: object = SHAPE) -> list[float]:
    operators = operators_of(copy.deepcopy(model).cpu().double().eval(), shape).values()
    dense = (ConvOperator(o.geometry, o.weight.detach()).to_dense() for o in operators)
    return [float(torch.linalg.matrix_norm(d, 2)) for d in dense]


def batch(
    device: torch.device | str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *SHAPE, generator=generator)
    return x.to(device, dtype), torch.randint(10, (6,), generator=generator).to(device)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    like = next(model.parameters())
    x, y = batch(like.device, seed, like.dtype)
    return nn.functional.cross_entropy(model(x).float(), y)


def normalised(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **kwargs: object
) -> tuple[nn.Module, Normalizer]:
    torch.manual_seed(5)
    model = ds_convnet(width=8).to(device, dtype)
    return model, Normalizer(model, SHAPE, K=2.0, **kwargs)  # type: ignore[arg-type]


def holds(model: nn.Module, most: float = 2 * (1 + EPS)) -> None:
    values = true_norms(model)
    assert len(values) == 5
    assert all(0.5 < v <= most for v in values), values


# Optimizers


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scaling", ["hard", "soft", "cap"])
def test_optimizers(name: str, scaling: str, device: torch.device) -> None:
    model, norm = normalised(device, scaling=scaling)
    optimizer = OPTIMIZERS[name](model.parameters())
    norm.attach(optimizer)
    for seed in range(4):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            return loss

        optimizer.step(closure)
    holds(model)
    steps = model[0].depthwise.parametrizations.weight[0].steps
    assert int(steps) == 5


def test_gradient_accumulation_equals_one_large_batch() -> None:
    ends = []
    for parts in (1, 3):
        model, norm = normalised(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norm.attach(optimizer)
        for seed in range(3):
            x, y = batch(seed=seed, dtype=torch.float64)
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(xs), ys) / parts).backward()
            optimizer.step()
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], msg=key)


@pytest.mark.parametrize("update", ["project", "differentiable"])
def test_several_forwards_before_a_step_as_in_a_gan(update: str) -> None:
    critic, norm = normalised(update=update)
    generator = nn.Linear(4, 64)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    norm.attach(optimizer)
    for _ in range(3):
        real, fake = torch.randn(5, *SHAPE), generator(torch.randn(5, 4)).view(5, *SHAPE)
        optimizer.zero_grad()
        (critic(real).mean() - critic(fake).mean() + critic(fake.detach()).square().mean()).backward()
        optimizer.step()
    holds(critic)


# Precision


def test_autocast_computes_norms_in_full_precision() -> None:
    model, norm = normalised()
    twin, other = normalised()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm.step()
    other.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm.attach(optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model).backward()
        optimizer.step()
    holds(model)


def test_differentiable_norms_do_not_depend_on_autocast() -> None:
    model, _ = normalised(update="differentiable")
    plain = [m.weight.detach() for m in model.modules() if hasattr(m, "parametrizations")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = [m.weight.detach() for m in model.modules() if hasattr(m, "parametrizations")]
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def test_steps_that_a_grad_scaler_skips_leave_normalised_weights(device: torch.device) -> None:
    model, norm = normalised(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm.attach(optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=2)
    skipped = 0
    for i in range(5):
        optimizer.zero_grad()
        before = model[0].pointwise.weight.detach().clone()
        scaler.scale(loss_of(model, i) * (math.inf if i in (1, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += torch.equal(before, model[0].pointwise.weight)
    assert skipped == 2
    holds(model)


@pytest.mark.parametrize("guarantee", [None, "upper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, guarantee: str | None, device: torch.device) -> None:
    model, norm = normalised(device, dtype, guarantee=guarantee)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norm.attach(optimizer)
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    holds(model, 2.0 if guarantee else 2 * (1 + EPS + 2 * torch.finfo(dtype).eps))
    assert all(p.dtype == dtype for n, p in model.named_parameters())


# Copies, averages, checkpoints


@pytest.mark.parametrize("update", ["project", "differentiable"])
@pytest.mark.parametrize("scaling", ["hard", "soft", "cap"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_copy_is_as_bounded_as_the_model(update: str, scaling: str, use_buffers: bool) -> None:
    """An average of weights of norm at most 1 has norm at most 1, since norms are convex.

    Where the weights are not projected, the norm of the average is computed from the average, and not from its averaged
    singular vectors.
    """
    model, norm = normalised(update=update, scaling=scaling)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norm.attach(optimizer)
    for i in range(6):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    assert all(v <= 2 * (1 + EPS) for v in true_norms(average.module))
    outputs = average(batch()[0])
    for name, buffer in average.named_buffers():
        if name.endswith("vector"):
            buffer.normal_()
    assert torch.equal(average(batch()[0]), outputs)
    assert all(v <= 2 * (1 + EPS) for v in true_norms(average.module))


def test_deepcopy_goes_on_alone() -> None:
    model, norm = normalised(scaling="soft")
    other, copied = copy.deepcopy((model, norm))
    assert copied.model is other
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    copied.attach(optimizer)
    before = copy.deepcopy(model.state_dict())
    loss_of(other).backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not torch.equal(other[0].pointwise.weight, model[0].pointwise.weight)
    holds(other)


def resumed(model: nn.Module, norm: Normalizer, steps: range, saved: bytes | None = None) -> bytes:
    """A few steps of training from a checkpoint, and the checkpoint after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if saved is not None:
        checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    norm.attach(optimizer)
    for i in steps:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    norm.detach()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


@pytest.mark.parametrize("update", ["project", "differentiable"])
@pytest.mark.parametrize("guarantee", [None, "upper"])
def test_a_run_from_a_checkpoint_is_bit_identical(update: str, guarantee: str | None) -> None:
    options = {"scaling": "soft", "update": update, "guarantee": guarantee}
    whole, norm = normalised(**options)
    whole[2].depthwise.parametrizations.weight.original.requires_grad_(False)
    resumed(whole, norm, range(8))
    first, norm = normalised(**options)
    first[2].depthwise.parametrizations.weight.original.requires_grad_(False)
    saved = resumed(first, norm, range(4))
    torch.manual_seed(77)
    second = ds_convnet(width=8)  # as in a new process: other weights, then the checkpoint
    second[2].depthwise.weight.requires_grad_(False)
    resumed(second, Normalizer(second, SHAPE, K=2.0, **options), range(4, 8), saved)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_weights_replaced_behind_its_back_are_seen_at_the_next_step() -> None:
    model, norm = normalised()
    state = {k: 5 * torch.randn_like(v) if k.endswith("original") else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    norm.step()
    holds(model)
    model.load_state_dict({k: 3 * v if k.endswith("original") else v for k, v in state.items()}, assign=True)
    norm.step()
    holds(model)
    with torch.no_grad():
        model[0].depthwise.weight = 7 * torch.randn(16, 1, 3, 3)
        model[2].pointwise.parametrizations.weight.original.data.normal_(std=9)
    norm.step()
    holds(model)


def test_evaluation_is_right_before_training_and_after_weights_change() -> None:
    model, _ = normalised(update="differentiable")
    model.eval()
    holds(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    holds(model)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    one, two = model(batch()[0]), model(batch()[0])
    assert torch.equal(one, two)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # a forward pass changes nothing


@pytest.mark.parametrize("update", ["project", "differentiable"])
def test_activation_checkpointing_recomputes_the_same_weights(update: str) -> None:
    gradients = []
    for segments in (0, 3):
        model, _ = normalised(dtype=torch.float64, update=update)
        x, y = batch(dtype=torch.float64)
        out = checkpoint_sequential(model, segments, x.requires_grad_(), use_reentrant=False) if segments else model(x)
        nn.functional.cross_entropy(out, y).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


def test_gradients_of_differentiable_norms() -> None:
    torch.set_default_dtype(torch.float64)
    for layer, shape in (
        (nn.Linear(4, 3), (4,)),
        (nn.Conv2d(3, 3, 3, groups=3), (3, 7, 5)),
        (nn.Conv1d(2, 3, 3), (2, 7)),
    ):
        Normalizer(nn.Sequential(layer), shape, K=2.0, scaling="soft", update="differentiable")
        scale, original = layer.parametrizations.weight[0], layer.parametrizations.weight.original
        for _ in range(200):  # until v is the singular vector itself, at which the formula is the derivative
            vector = scale.measure.one(original.detach(), scale.vector, None, 1e-12).vector
            if vector is not None:
                scale.vector.copy_(vector)
        target = torch.randn_like(original)

        def loss(w: Tensor, scale: nn.Module = scale, target: Tensor = target) -> Tensor:
            return (scale(w) * target).sum()

        (found,) = torch.autograd.grad(loss(original), original)
        step = 1e-6
        for index in itertools.islice(itertools.product(*map(range, original.shape)), 7):
            moved = torch.zeros_like(original)
            moved[index] = step
            with torch.no_grad():
                numeric = (loss(original + moved) - loss(original - moved)) / (2 * step)
            torch.testing.assert_close(found[index], numeric, rtol=1e-4, atol=1e-6)


# Compilers and export

# Dynamo traces a cached function afresh, and says so; what the grids are does not change meanwhile
TRACES_CACHES = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a .functools.lru_cache",
    "ignore:.torch.jit:DeprecationWarning",  # inductor imports it
)


@TRACES_CACHES
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")  # it runs them eagerly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at all of them
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("update", ["project", "differentiable"])
def test_a_compiled_model_trains_as_the_eager_one(backend: str, update: str, device: torch.device) -> None:
    ends, graphs = [], []
    for compiled in (False, True):
        model, norm = normalised(device, torch.float64, update=update, scaling="soft")
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norm.attach(optimizer)
        for i in range(3):
            optimizer.zero_grad()
            x, y = batch(device, i, torch.float64)
            nn.functional.cross_entropy(run(x), y).backward()
            optimizer.step()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        ends.append(model.state_dict())
    assert graphs[2] < graphs[-1] == graphs[-2], graphs  # compiled once, and not at every step
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], msg=key)


@TRACES_CACHES
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_can_be_compiled(backend: str, device: torch.device) -> None:
    model, norm = normalised(device)
    torch._dynamo.reset()
    step, graphs = torch.compile(norm.step, backend=backend), []
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[-2], graphs  # compiled once, and not at every step
    holds(model)


@TRACES_CACHES
@pytest.mark.parametrize("scaling", ["hard", "soft"])
def test_a_compiled_model_is_one_graph_for_every_batch_size(scaling: str, device: torch.device) -> None:
    """And not compiled again when the weights have moved."""
    model, norm = normalised(device, scaling=scaling)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm.attach(optimizer)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i, size in enumerate((6, 5, 6, 3)):
            optimizer.zero_grad()
            x, y = (part[:size].clone() for part in batch(device, i))
            outputs = run(x)
            nn.functional.cross_entropy(outputs, y).backward()
            torch.testing.assert_close(outputs, model(x))
            optimizer.step()
    holds(model)


def removed() -> tuple[nn.Module, Tensor, Tensor]:
    model, norm = normalised(scaling="soft")
    model.eval()
    x = batch()[0]
    with torch.no_grad():
        before = model(x)
    kinds = [type(m) for m in ds_convnet(width=8).modules()]
    norm.remove()
    assert [type(m) for m in model.modules()] == kinds
    assert model.state_dict().keys() == ds_convnet(width=8).state_dict().keys()
    return model, x, before


@pytest.mark.parametrize("update", ["project", "differentiable"])
@pytest.mark.parametrize("scaling", ["hard", "soft", "cap"])
def test_remove_leaves_plain_modules_with_the_same_outputs(update: str, scaling: str) -> None:
    model, norm = normalised(update=update, scaling=scaling)
    weight = model[0].depthwise.parametrizations.weight.original
    model.eval()
    before = model(batch()[0])
    norm.remove()
    assert model[0].depthwise.weight is weight
    assert torch.equal(model(batch()[0]), before)
    Normalizer(model, SHAPE, K=1.0)  # and a new one may come


def test_export_after_remove() -> None:
    model, x, before = removed()
    assert torch.equal(torch.export.export(model, (x,)).module()(x), before)


def test_jit_trace_after_remove() -> None:
    model, x, before = removed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, and still asked for
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), before)


@pytest.mark.slow
def test_onnx_after_remove() -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x, before = removed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own dependencies
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), before, rtol=1e-4, atol=1e-5)


# On a GPU


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


@pytest.mark.parametrize("guarantee", [None, "upper"])
def test_a_step_on_a_gpu_never_waits(cuda: torch.device, guarantee: str | None) -> None:
    model, norm = normalised(cuda, guarantee=guarantee)
    norm.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            for parameter in model.parameters():
                parameter.data.mul_(1.1)
            norm.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    holds(model)


def test_a_step_can_be_captured_in_a_cuda_graph(cuda: torch.device) -> None:
    model, norm = normalised(cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        norm.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm.step()
    for _ in range(8):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        graph.replay()
    holds(model)


def test_a_gpu_reports_a_weight_without_a_norm_later_and_writes_nothing(cuda: torch.device) -> None:
    model, norm = normalised(cuda)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model[2].pointwise.parametrizations.weight.original.fill_(math.nan)
    before = model[0].pointwise.weight.detach().clone()
    norm.step()
    assert torch.equal(model[0].pointwise.weight, before)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"2.pointwise"):
        norm.step()
    with pytest.raises(ValueError, match=r"2.pointwise"):
        norm.norms()
