"""`opnorm bench step`: what normalisation adds to a training step, next to the other ways to do it.

normflows is missing: its layers normalise themselves in a forward pass, and drop the groups of a depthwise one.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from opnorm import Method, Normalizer, models, operators_of
from opnorm.lab.bench.memory import growth
from opnorm.lab.bench.timing import MALLOC, interleaved, keep_memory
from opnorm.lab.cli import console_width, parse
from opnorm.lab.record import environment, write_json
from opnorm.norms.baselines import Delattre2024, Farnia2018, Prach2022, Runkel2021
from opnorm.operator import ConvOperator

BARE, OURS = "no normalisation", "Normalizer"


@dataclass(frozen=True)
class Network:
    """A network, its input, the batch of the paper or one that fits, and a norm that keeps its signal in range."""

    name: str
    input: tuple[int, int, int]
    batch: int
    K: float


NETWORKS = {
    "ds_resnet34": Network("ds_resnet34", (3, 32, 32), 128, 5.0**0.5),
    "mobilenet_v2": Network("mobilenet_v2", (3, 224, 224), 32, 3.0),
}


@dataclass(frozen=True)
class Step:
    """Training steps with and without normalisation, in turn in one process: ratios to the step without.

    For example:
      opnorm bench step --network ds_resnet34 --json results/step_ds_resnet34.json
    """

    network: Literal["ds_resnet34", "mobilenet_v2"] = "ds_resnet34"
    """The network: ds_resnet34 on 32×32 with batch 128, or mobilenet_v2 on 224×224 with batch 32."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the results."""

    rounds: int = 15
    """How often each candidate is timed."""

    batch: int | None = None
    """Another batch size."""

    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""

    only: tuple[str, ...] = ()
    """Some of the candidates, by name; the step without normalisation always runs."""

    seed: int = 0
    """For weights and batches."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    config = parse(Step, argv, "opnorm bench step")
    if config.device == "cpu":
        keep_memory(["bench", "step", *argv])
    network, device = NETWORKS[config.network], torch.device(config.device)
    torch.manual_seed(config.seed)
    base = models.build(network.name).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(config.batch or network.batch, *network.input, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (len(images),), device=device)
    candidates, refused = {}, {}
    for name, build in WAYS.items():
        if name == BARE or not config.only or name in config.only:
            try:
                candidates[name] = partial(_step, *build(copy.deepcopy(base), network), images, labels)
                candidates[name]()
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                candidates.pop(name, None)
                refused[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    results = {
        "environment": environment(["bench", "step", *argv], config.seed),
        "network": network,
        "batch": len(images),
        "step": interleaved(candidates, config.rounds, network.name),
        "not_run": refused,
        "normaliser": _normaliser(copy.deepcopy(base), network, config.rounds),
    }
    _show(results)
    if config.json:
        write_json(config.json, results)
    return 0


Way = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object], x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    after()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _bare(model: nn.Module, network: Network) -> Way:
    return model, _sgd(model), lambda: None


def _ours(model: nn.Module, network: Network, **options: Any) -> Way:
    norm = Normalizer(model, network.input, K=network.K, **options)
    return model, _sgd(model), norm.step


def _captured(model: nn.Module, network: Network) -> Way:
    """`Normalizer.step` recorded once as a CUDA graph and replayed: one launch, where the step is a thousand."""
    if not next(model.parameters()).is_cuda:
        raise ValueError("needs a GPU")
    norm = Normalizer(model, network.input, K=network.K)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        norm.step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        norm.step()
    return model, _sgd(model), graph.replay


def normalized_by_layer(
    model: nn.Module, shape: Sequence[int], K: float, methods: Mapping[str, Method]
) -> Callable[[], None]:
    """θ ← K·θ/‖K_θ‖, one layer after the other, with a published method for each kind of layer.

    Args:
        model: the network, whose weights change at every call of what is returned.
        shape: of its input without batch.
        K: the norm of each layer.
        methods: {kind of a geometry: its method}; layers of other kinds stay as they are.
    """
    modules = dict(model.named_modules())
    found = operators_of(model, shape)
    layers = {name: op.geometry for name, op in found.items() if op.geometry.kind in methods}
    states: dict[str, Any] = dict.fromkeys(layers)

    @torch.no_grad()
    def normalise() -> None:
        for name, geometry in layers.items():
            weight = modules[name].weight
            bound = methods[geometry.kind].compute(ConvOperator(geometry, weight.detach()), states[name])
            states[name] = bound.state
            weight.mul_(K / bound.value)

    return normalise


def paper_methods() -> dict[str, Method]:
    """The paper's method for each kind of layer that it has one for: not for dense and grouped convolutions."""
    return dict.fromkeys(("depthwise", "pointwise", "linear"), Runkel2021())


def _by_layer(model: nn.Module, network: Network, methods: Mapping[str, Method]) -> Way:
    return model, _sgd(model), normalized_by_layer(model, network.input, network.K, methods)


def _published(method: Method) -> Callable[[nn.Module, Network], Way]:
    """A published method for the layers of every kind."""
    return partial(_by_layer, methods=dict.fromkeys(("depthwise", "pointwise", "linear", "dense", "grouped"), method))


def _torch(model: nn.Module, network: Network) -> Way:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.utils.parametrizations.spectral_norm(module)
    return model, _sgd(model), lambda: None


def _torchlip(model: nn.Module, network: Network) -> Way:
    """What deel-torchlip's spectral layers do before their Björck iterations: torch's σ, and its factor for windows."""
    from deel.torchlip.utils import lconv_norm

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.utils.parametrizations.spectral_norm(module, n_power_iterations=3)
            if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                lconv_norm(module)
    return model, _sgd(model), lambda: None


def _aol(model: nn.Module, network: Network) -> Way:
    """What orthogonium's AOLConv2D does to its weight, as it does it by default; the package has no linear one."""
    from orthogonium.layers.conv.AOL.aol import MultiStepAOLReparametrizer

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            features = min(module.in_channels, module.out_channels)
            scaled = MultiStepAOLReparametrizer(features, groups=module.groups, niter=1).to(module.weight)
            nn.utils.parametrize.register_parametrization(module, "weight", scaled)
    return model, _sgd(model), lambda: None


WAYS: dict[str, Callable[[nn.Module, Network], Way]] = {
    BARE: _bare,
    OURS: _ours,
    "Normalizer, CUDA graph": _captured,
    "Normalizer, soft": partial(_ours, scaling="soft"),
    "Normalizer, guarantee='upper'": partial(_ours, guarantee="upper"),
    "Normalizer, layer by layer": partial(_ours, batched=False),
    "the paper's method": partial(_by_layer, methods=paper_methods()),
    "power iteration on full operators": _published(Farnia2018()),
    "Prach2022": _published(Prach2022()),
    "Delattre2024": _published(Delattre2024()),
    "torch spectral_norm": _torch,
    "deel-torchlip": _torchlip,
    "orthogonium AOL": _aol,
}


def _normaliser(model: nn.Module, network: Network, rounds: int) -> dict[str, Any]:
    """The seconds of `Normalizer.step()` alone, weights changing as in training, the bytes that it keeps, its peak."""
    norm = Normalizer(model, network.input, K=network.K)
    move = partial(_move, model)

    def normalised() -> None:
        move()
        norm.step()

    times = interleaved({"nothing": move, "step": normalised}, rounds, "Normalizer.step")
    kept = sum(b.numel() * b.element_size() for name, b in model.named_buffers() if "parametrizations" in name)
    return {"seconds": times["step"]["seconds"], "state_bytes": kept} | _peak(norm, model, network)


@torch.no_grad()
def _move(model: nn.Module) -> None:
    torch._foreach_mul_([p for p in model.parameters() if p.dim() > 1], 1.001)


def _peak(norm: Normalizer, model: nn.Module, network: Network) -> dict[str, int]:
    """What a step needs beside what is kept, at its peak."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        return {"peak_bytes": _peak_in_process(network)}
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    norm.step()
    return {"peak_bytes": torch.cuda.max_memory_allocated(device) - before}


def _peak_in_process(network: Network) -> int:
    """In a process of its own, which gives freed memory back as usual: what it keeps would serve the step unseen."""
    code = "import sys; from opnorm.lab.bench.step import report; report(sys.argv[1])"
    usual = {name: value for name, value in os.environ.items() if name not in MALLOC}
    command = [sys.executable, "-c", code, network.name]
    done = subprocess.run(command, env=usual, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout))


def report(name: str) -> None:
    """Print by how much the resident memory of this process rises, at its peak, over one step of the `Normalizer`."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = models.build(name)
    norm = Normalizer(model, network.input, K=network.K)
    norm.step()  # the first one loads code
    _move(model)
    print(growth(norm.step))


def _show(results: dict[str, Any]) -> None:
    table = Table("training step", "ms", "ratio", "quartiles", title=results["network"].name)
    for name, cell in results["step"].items():
        ratio = cell["ratio"]
        spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        table.add_row(name, f"{1e3 * cell['seconds']['median']:.1f}", f"{ratio['median']:.4f}", spread)
    for name, reason in results["not_run"].items():
        table.add_row(name, "", "", reason)
    console = Console(width=console_width())
    console.print(table)
    alone = results["normaliser"]
    share = alone["seconds"]["median"] / results["step"][BARE]["seconds"]["median"]
    peak = f", and needs {alone['peak_bytes'] / 2**20:.1f} MiB at its peak" if "peak_bytes" in alone else ""
    console.print(
        f"Normalizer.step alone: {1e3 * alone['seconds']['median']:.2f} ms, {share:.2%} of a step without; "
        f"it keeps {alone['state_bytes'] / 1e3:.1f} kB{peak}"
    )
