"""What a run leaves: weights, certificate, confusion matrix, curves, and one JSON from which it can be repeated."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import save as safetensors
from torch import Tensor, nn

from opnorm.certify import Certificate, above
from opnorm.lab.checkpoint import write_bytes
from opnorm.lab.data import Data
from opnorm.lab.record import plain, write_json, write_text
from opnorm.lab.train_config import Train
from opnorm.lab.train_loop import TEST_BATCH, Progress, Record, certificate_of, logits_of, reason_of
from opnorm.lab.train_model import Network
from opnorm.lab.train_page import LARGEST, run_page
from opnorm.normalize.scaling import NormScale

PAGE = "page.html"
FILES = ("result.json", "model.safetensors", "certificate.json", "curves.png", "confusion.png", PAGE)
POINTS = 100  # of the curve of the certified accuracy


def report(
    config: Train, data: Data, network: Network, progress: Progress, begun: Mapping[str, Any], diverged: str | None
) -> dict[str, Any]:
    """Measure the network at the end of its run, write everything into the run's folder, and return the result."""
    result: dict[str, Any] = {
        "status": "diverged" if diverged else "finished",
        "reason": diverged,
        "model": config.model,
        "config": config.to_dict(),
        **begun,
        "K_per": network.K_per if config.normalize else None,
        "data": facts_of(data),
        "parameters": sum(p.numel() for p in network.bare.parameters()),
        "seconds": progress.seconds,
        "normalizing_seconds": progress.normalizing,
    }
    folder, proof = config.folder, None
    if not diverged:
        bare = network.plain()
        found, certificate = measured(bare, data, config.radii, config.workers)
        result |= found | norms_of(network)
        if certificate is not None:
            proof = certificate.to_dict()
            write_json(folder / "certificate.json", proof)
        write_bytes(folder / "model.safetensors", safetensors(_state(bare), {"format": "pt"}))
        if len(data.classes) <= LARGEST:
            write_bytes(folder / "confusion.png", _png(confusion_figure(result["confusion"], data.classes)))
    if progress.history:
        write_bytes(folder / "curves.png", _png(curves_figure(progress.history)))
    whole = result | {"history": progress.history}
    write_text(folder / PAGE, run_page(plain(whole), plain(proof)))
    write_json(folder / "result.json", whole)  # the last: by this a sweep knows that a run has ended
    return result


def facts_of(data: Data) -> dict[str, Any]:
    """What a result says of its data, and what a network needs to be built again without it."""
    counts = {"training": len(data.train.labels), "test": len(data.test.labels)}
    fields = ("notes", "classes", "shape", "mean", "std")
    return {"name": data.name, **counts, **{field: getattr(data, field) for field in fields}}


def summary(result: dict[str, Any], data: Data) -> list[str]:
    """The result in lines for a person."""
    if result["status"] == "diverged":
        return [f"diverged: {result['reason']}"]
    lines = [f"test accuracy {result['test_accuracy']:.2%} on {result['data']['test']:,} images"]
    if result["bound"] is None:
        lines.append(f"no certificate: {result['no_bound']}")
    else:
        lines.append(f"certificate: ‖f(x) - f(y)‖ ≤ {above(result['bound'])} ‖x - y‖, for pixels from 0 to 1")
        accuracies = result["certified_accuracy"].items()
        lines += [f"certified accuracy at radius {radius:.4g}: {part:.2%}" for radius, part in accuracies if radius]
    confused = _most_confused(torch.tensor(result["confusion"]), data.classes)
    return [*lines, confused] if confused else lines


def measured(
    plain: nn.Module, data: Data, radii: Sequence[float], workers: int
) -> tuple[dict[str, Any], Certificate | None]:
    """Accuracy, confusion matrix and certified accuracy of a network with plain weights, and its certificate if any."""
    device = next(plain.parameters()).device
    logits, labels = logits_of(plain, data.test_batches(TEST_BATCH, device, workers=workers))
    predicted, classes = logits.argmax(1), len(data.classes)
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)
    found = {"test_accuracy": float((predicted == labels).double().mean()), "confusion": confusion.tolist()}
    try:
        certificate = certificate_of(plain, data)
    except ValueError as error:
        return found | {"bound": None, "no_bound": reason_of(error)}, None
    accuracies = {
        "certified_accuracy": certified(certificate, logits, labels, radii),
        "certified_curve": certified_curve(certificate, logits, labels),
    }
    return found | accuracies | {"bound": certificate.bound}, certificate


def norms_of(network: Network) -> dict[str, Any]:
    """What normalisation has done: the norm of every layer, its factor, and its K."""
    if network.normalizer is None:
        return {"scales": {}}
    norms = {name: float(norm) for name, norm in network.normalizer.norms().items()}
    named = network.model.named_modules()
    limits = {n.removesuffix(".parametrizations.weight.0"): m.K for n, m in named if isinstance(m, NormScale)}
    for first, second in (name.split(" → ") for name in norms if " → " in name):
        limits[f"{first} → {second}"] = limits[first] * limits.pop(second)  # which alone may have more
    return {"norms": norms, "scales": network.scales(), "limits": limits}


def certified(certificate: Certificate, logits: Tensor, labels: Tensor, radii: Sequence[float]) -> dict[float, float]:
    """The part of the images that are classified rightly and stay so within each radius."""
    right, radius = logits.argmax(1) == labels, certificate.radius(logits)
    return {r: float((right & ((radius > r) | (r == 0))).double().mean()) for r in radii}


def certified_curve(certificate: Certificate, logits: Tensor, labels: Tensor) -> list[tuple[float, float]]:
    """(radius, certified accuracy) from 0 to the largest radius of any image, in POINTS steps."""
    right = certificate.radius(logits)[logits.argmax(1) == labels]
    largest = float(right.max()) if len(right) else 0.0
    if not 0 < largest < math.inf:
        return []
    return [*certified(certificate, logits, labels, [largest * (i / POINTS) for i in range(POINTS + 1)]).items()]


def curves_figure(history: Sequence[Record]) -> Figure:
    """Loss, accuracy and, where it was measured, the bound of the network, by epoch."""
    bounds = [(r["epoch"], r["bound"]) for r in history if "bound" in r]
    figure = Figure(figsize=(4.2 * (3 if bounds else 2), 3.4), layout="constrained")
    axes = figure.subplots(1, 3 if bounds else 2)
    epochs = [r["epoch"] for r in history]
    for panel, what in zip(axes, ("loss", "accuracy"), strict=False):
        for part, style in (("train", "--"), ("test", "-")):
            panel.plot(epochs, [r[f"{part}_{what}"] for r in history], style, label=part)
        panel.set(xlabel="epoch", title=what)
        panel.legend()
    if bounds:
        axes[2].plot(*zip(*bounds, strict=True), ".-")
        axes[2].set(xlabel="epoch", title="Lipschitz bound", yscale="log")
    return figure


def confusion_figure(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Rows: what the images show; columns: what the network says, as parts of the row."""
    counts = torch.tensor(confusion, dtype=torch.float64)
    parts = counts / counts.sum(1, keepdim=True).clamp(min=1)
    side = 1.6 + 0.42 * len(classes)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(parts.tolist(), cmap="Blues", vmin=0, vmax=1)
    for (i, row), j in ((pair, j) for pair in enumerate(confusion) for j in range(len(classes))):
        if row[j]:
            colour = "white" if parts[i, j] > 0.5 else "black"
            axes.text(j, i, str(row[j]), ha="center", va="center", fontsize=8, color=colour)
    places = range(len(classes))
    axes.set_xticks(places, classes, rotation=90)
    axes.set_yticks(places, classes)
    axes.set(xlabel="predicted", ylabel="shown")
    return figure


def _most_confused(confusion: Tensor, classes: Sequence[str]) -> str:
    wrong = confusion - confusion.diag().diag()
    most = int(wrong.max())
    if most == 0:
        return ""
    shown, said = divmod(int(wrong.argmax()), len(classes))
    return f"most often confused: {classes[shown]} taken for {classes[said]}, {most} times"


def _state(plain: nn.Module) -> dict[str, Tensor]:
    return {name: value.contiguous().cpu() for name, value in plain.state_dict().items()}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
