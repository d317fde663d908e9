"""The numbers on docs/results.md are those of the committed files, and the files say what the page claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def check(*cells: str) -> None:
    row = f"| {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "results.md").read_text(), row


def percent(*values: float) -> list[str]:
    return [f"{100 * value:.2f} %" for value in values]


def milliseconds(cell: dict[str, Any]) -> str:
    return f"{1e3 * cell['seconds']['median']:.1f}"


def test_every_file_names_its_command_commit_and_machine() -> None:
    files = list((ROOT / "results").glob("**/*.json"))
    assert files
    for file in files:
        environment = json.loads(file.read_text())["environment"]
        assert environment["command"].startswith("opnorm ")
        assert environment["commit"] and not environment["commit"].endswith("+changes"), file
        assert environment["torch"] and environment["processor"] and environment["cores"]


def test_the_table_of_mobilenet() -> None:
    norms = read("norms_mobilenet_v2")
    names = {"Runkel2021": "the paper, `Runkel2021`", "FourierBound": "`FourierBound()`", "auto": "`auto`"}
    for key, name in names.items():
        found = [norms["overestimation"][stride][key] for stride in ("stride 1", "stride 2")]
        check(name, *percent(*(average[what] for average in found for what in ("mean", "largest"))))
    for key, cell in norms["time"].items():
        check(key, milliseconds(cell), f"{cell['ratio']['median']:.2f}")


def test_mobilenet_is_bounded_within_half_a_percent_in_half_the_time() -> None:
    norms = read("norms_mobilenet_v2")
    average = norms["overestimation"]
    assert average["stride 1"]["FourierBound"]["mean"] <= 0.005
    assert average["stride 2"]["FourierBound"]["mean"] <= 0.001
    assert 0.026 < average["stride 1"]["Runkel2021"]["mean"] < 0.03
    assert 0.73 < average["stride 2"]["Runkel2021"]["mean"] < 0.79
    for row in norms["layers"]:
        over = row["overestimation"]
        assert 0 <= over["exact"] < 1e-6
        assert 0 <= over["auto"] <= over["FourierBound"] + 1e-6
        assert over["FourierBound"] < over["Runkel2021"]
    assert norms["time"]["FourierBound, one call"]["ratio"]["median"] < 1


def test_the_figure_of_mobilenet_shows_what_its_captions_say() -> None:
    """17 depthwise layers of trained weights; every bound lies above the norm; on the axis is what is exact."""
    norms, floor = read("norms_mobilenet_v2"), 1e-5
    assert len(norms["layers"]) == 17 and "mobilenetv2" in norms["weights"]
    for row in norms["layers"]:
        over = [row["overestimation"][name] for name in ("Runkel2021", "FourierBound", "auto")]
        assert all(value > 0 for value in over)
        assert all(value > floor or value < 1e-7 for value in over)  # of float32
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert "17 depthwise layers of a trained MobileNetV2" in text and "above the norm" in text
    assert "auto; on the axis: exact" in (ROOT / "docs" / "img" / "mobilenet.svg").read_text()
    assert "FLOOR = 1e-5" in (ROOT / "docs" / "figures" / "mobilenet.py").read_text()


def test_the_table_of_memory() -> None:
    for case, methods in read("norms_memory")["cases"].items():
        for key, cell in methods.items():
            check(case, key, f"{cell['peak_bytes'] / 2**20:.1f}", milliseconds(cell), f"{cell['ratio']['median']:.3f}")


def test_memory_stays_small_and_volumes_are_ten_times_faster() -> None:
    mobilenet, volume = read("norms_memory")["cases"].values()
    assert mobilenet["FourierBound"]["peak_bytes"] < 64 * 2**20
    assert volume["FourierBound"]["peak_bytes"] < 256 * 2**20
    assert volume["FourierBound"]["ratio"]["median"] < 0.1


def test_the_table_of_small_inputs() -> None:
    small = read("norms_small")
    for size, row in [*small["by_size"].items(), ("all", small["all"])]:
        shown = percent(*(row[m][what] for m in ("FourierBound", "auto") for what in ("mean", "largest")))
        check(size, str(row["cases"]), *shown, f"{row['cost']['FourierBound']:.2f}")


def test_auto_stays_within_half_a_percent_at_every_size_for_twice_the_embedding() -> None:
    small = read("norms_small")
    assert small["all"]["cost"]["FourierBound"] <= 2
    assert all(row["cost"]["FourierBound"] < 2.1 for row in small["by_size"].values())  # as the page says
    assert all(row["auto"]["mean"] <= 0.005 for row in small["by_size"].values())
    assert all(case["auto"] > -1e-6 for case in small["cases"])
    assert min(small["training_accuracy"].values()) > 0.9


STEPS = ("step_ds_resnet34", "step_mobilenet_v2")


@pytest.mark.parametrize("name", STEPS)
def test_the_table_of_steps(name: str) -> None:
    for what, cell in read(name)["step"].items():
        ratio = cell["ratio"]
        check(what, milliseconds(cell), f"{ratio['median']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}")


def test_normalising_needs_little_memory() -> None:
    for name in STEPS:
        result = read(name)
        assert result["normaliser"]["state_bytes"] < 200_000
        assert result["normaliser"]["peak_bytes"] < 64 * 2**20
        kept, peak = result["normaliser"]["state_bytes"] / 1e3, result["normaliser"]["peak_bytes"] / 2**20
        check(result["network"]["name"], str(result["batch"]), f"{kept:.1f}", f"{peak:.1f}")


def test_what_normalising_costs_is_said_plainly() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    costs = [f"{100 * (read(name)['step']['Normalizer']['ratio']['median'] - 1):.1f} %" for name in STEPS]
    assert "Here it costs {} and {}.".format(*costs) in page
    for name in STEPS:
        step = {what: cell["ratio"]["median"] for what, cell in read(name)["step"].items()}
        assert step["Normalizer"] < step["power iteration on full operators"]


@pytest.mark.parametrize("name", ["train_cifar10", "train_digits"])
def test_the_table_of_throughput(name: str) -> None:
    times, steps = read(name)["times"], read(name)["steps_a_round"]
    for what, cell in times.items():
        part = "" if what in ("bare step", "the data alone") else f"{100 / cell['ratio']['median']:.1f} %"
        check(what, f"{1e3 * cell['seconds']['median'] / steps:.2f}", f"{cell['ratio']['median']:.3f}", part)


def test_the_loop_has_95_percent_of_the_throughput_of_the_bare_step() -> None:
    times = read("train_cifar10")["times"]
    assert 1 / times["the loop"]["ratio"]["median"] >= 0.95
    assert times["the data alone"]["ratio"]["median"] < 0.05


CIFAR = {"K5_hard": "K = 5, hard", "K5_soft": "K = 5, soft", "K6_hard": "K = 6, hard", "K6_soft": "K = 6, soft"}


def at_their_bounds(result: dict[str, Any]) -> dict[str, float]:
    """Norm over what it should be, for the layers on at least 14 pixels and those without any."""
    small = ("stages.2.", "stages.3.")  # 8 and 4 pixels
    parts = {name: norm / result["scales"][name] for name, norm in result["norms"].items()}
    return {name: part for name, part in parts.items() if not (name.startswith(small) and "depthwise" in name)}


@pytest.mark.parametrize("name", CIFAR)
def test_the_table_of_cifar10(name: str) -> None:
    result = read(f"cifar10_{name}")
    last, least = result["history"][-1], min(norm / result["scales"][n] for n, norm in result["norms"].items())
    shown = percent(result["test_accuracy"], last["train_accuracy"], min(at_their_bounds(result).values()), least)
    check(CIFAR[name], *shown, f"{result['bound']:.1e}")


@pytest.mark.parametrize("name", CIFAR)
def test_the_figure_of_cifar10_shows_the_runs_of_its_caption(name: str) -> None:
    result = read(f"cifar10_{name}")
    assert [row["epoch"] for row in result["history"]] == [*range(1, 13)]
    assert (result["data"]["training"], result["data"]["test"]) == (10_000, 10_000)
    config = {"optimizer": "adam", "schedule": "onecycle", "lr": 0.002, "precision": "bf16", "model": "ds_resnet34"}
    assert result["config"] | config == result["config"] and result["environment"]["threads"] == 1
    assert f"K = {result['config']['K']:g}, {result['config']['scaling']}" == CIFAR[name]
    assert CIFAR[name] in (ROOT / "docs" / "img" / "cifar10.svg").read_text()
    assert result["history"][-1]["train_loss"] < result["history"][0]["train_loss"] / 2


@pytest.mark.parametrize("name", CIFAR)
def test_cifar10_is_learned_with_every_layer_at_its_bound(name: str) -> None:
    result = read(f"cifar10_{name}")
    assert result["status"] == "finished" and result["test_accuracy"] >= 0.55
    assert len(result["norms"]) == 67
    assert max(norm / result["scales"][n] for n, norm in result["norms"].items()) <= 1 + 1e-6
    assert min(at_their_bounds(result).values()) >= 0.98
