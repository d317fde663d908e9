"""`run_page`: the page of a run, a pure function of the JSON files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from opnorm.report import CERTIFICATE, page

RUN = files("opnorm.lab").joinpath("train_page.html")
LARGEST = 30  # classes up to which the whole confusion matrix is shown
MOST = 20  # pairs of classes that are named where there are more
NUMBERS = (
    "reason", "test_accuracy", "certified_accuracy", "certified_curve", "bound", "no_bound", "parameters", "seconds",
)  # fmt: skip
DRAWN = ("epoch", "train_loss", "test_loss", "train_accuracy", "test_accuracy", "bound")
Facts = Mapping[str, Any]


def run_page(result: Facts, certificate: Facts | None) -> str:
    """One self-contained HTML file: the result, the curves and the certificate, from what the files of a run hold.

    What `opnorm eval` finds may have no curves, norms or settings.
    """
    name = f"{result['model']} on {result['data']['name']}"
    accuracy = result.get("test_accuracy")
    title = f"{name}: " + ("diverged" if accuracy is None else f"test accuracy {accuracy:.2%}")
    shown = {
        "notes": _notes(result),
        "curves": f"Loss: the cross entropy of the logits times {result['config']['logit_scale']:g}."
        if result.get("history")
        else "",
        "layers": _layers(result),
        "norms": _about_norms(result),
        "classes": _classes(result),
        "confused": _confused(result),
        **_commands(result),
        "settings": {k.replace("_", "-"): _text(v) for k, v in result.get("config", {}).items()},
        "environment": {k: _text(v) for k, v in result["environment"].items() if k != "command"},
    }
    numbers = {key: result.get(key) for key in NUMBERS}
    numbers["history"] = [{key: record.get(key) for key in DRAWN} for record in result.get("history", ())]
    numbers["confusion"] = result["confusion"] if shown["classes"] else None
    parts = [(RUN, "data")] + ([] if certificate is None else [(CERTIFICATE, "data.certificate")])
    return page(title, name, {"result": numbers, "shown": shown, "certificate": certificate}, parts)


def _notes(result: Facts) -> str:
    """What the numbers are of."""
    parts = "; ".join([f"{result['data']['test']:,} test images", *result["data"]["notes"]])
    return f"{parts}. {result['environment']['date'][:10]}."


def _layers(result: Facts) -> list[dict[str, Any]]:
    """A row for each normalised layer: its norm, its K, and the factor of soft scaling."""
    soft = result.get("config", {}).get("scaling") == "soft"
    limits, scales = result.get("limits", {}), result.get("scales", {}) if soft else {}
    norms = result.get("norms", {}).items()
    return [{"name": n, "norm": v, "limit": limits.get(n), "factor": scales.get(n)} for n, v in norms]


def _about_norms(result: Facts) -> str:
    if not result.get("norms"):
        return ""
    config = result["config"]
    what = {"hard": "norm K", "soft": "norm K·tanh(s), s learned", "cap": "a norm of at most K"}[config["scaling"]]
    pairs = {
        "layer": "",
        "pair": " The two layers of a depthwise and pointwise pair share K, the root of it for each.",
        "joint": " A pair of layers is bounded as one map; its second layer alone may have any norm.",
    }[result["K_per"]]
    return f"On the input size of the layer, proven from above. Every step of the training gave it {what}.{pairs}"


def _classes(result: Facts) -> list[str]:
    """The names of the classes, where the confusion matrix is small enough to be shown."""
    classes = result["data"]["classes"]
    return classes if "confusion" in result and len(classes) <= LARGEST else []


def _confused(result: Facts) -> list[tuple[str, str, int]]:
    """The classes that are confused most often: shown, said, and how many times."""
    names, rows = result["data"]["classes"], result.get("confusion", ())
    pairs = [(names[i], names[j], n) for i, row in enumerate(rows) for j, n in enumerate(row) if n and i != j]
    return sorted(pairs, key=lambda pair: -pair[2])[:MOST]


def _commands(result: Facts) -> dict[str, Any]:
    environment = result["environment"]
    version = _version(environment)
    if "trained_by" in result:
        text = f"The first command found this, of the run that the second began; {version}."
        return {"repeat": text, "commands": [environment["command"], result["trained_by"]]}
    others = [v for v in dict.fromkeys(map(_version, result.get("resumed", ()))) if v != version]
    later = f" What was resumed was computed with {' and '.join(others)}." if others else ""
    return {"repeat": f"This command repeats it, with {version}.{later}", "commands": [environment["command"]]}


def _version(environment: Facts) -> str:
    commit, _, changes = (environment["commit"] or "").partition("+")
    version = f"opnorm {environment['opnorm']}" + (f", commit {commit[:12]}" if commit else "")
    return version + (" with changes" if changes else "")


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)
