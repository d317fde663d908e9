"""`opnorm reproduce compare`: what counts as noise between two results of an experiment, and what does not."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm.lab import paper
from opnorm.lab.cli import UsageError, run
from opnorm.lab.paper import EXPERIMENTS
from opnorm.lab.paper.noise import GAPS, NOISE, apart

IMAGES = 10_000
QUARTILES = {"low": 1.02, "median": 1.03, "high": 1.05}


def result(cells: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"profile": "small", "settings": {"seed": 0, "data_path": "here"}, **about, "cells": cells}


def tightness() -> dict[str, Any]:
    quartiles = {"low": 0.01, "median": 0.02, "high": 0.04}
    return result({f"3×3, N = {n}": {"family": "3×3", "N": n, "paper": {**quartiles}} for n in (7, 10)})


def pretrained() -> dict[str, Any]:
    layer = {"norm": 40.0, "over": {"auto": 0.0, "Singla2021": 0.5}, "guarantee": {"auto": "upper"}, "refused": {}}
    return result({name: copy.deepcopy(layer) for name in ("first", "second")}, sha256="abc")


def trained(**accuracies: float | None) -> dict[str, Any]:
    """Runs with K = 5, by learning rate."""
    cells = {
        name: {
            "cell": {"K": 5.0, "lr": float(name.replace("_", "-"))},
            "status": "diverged" if accuracy is None else "finished",
            "test_accuracy": accuracy,
        }
        for name, accuracy in accuracies.items()
    }
    return result(cells, data={"test": IMAGES, "notes": []})


def grid() -> dict[str, Any]:
    return trained(**{"1e_4": 0.4, "1e_3": 0.5, "1e_2": 0.6, "1e_1": None})


def imagenet() -> dict[str, Any]:
    cell = {"status": "finished", "test_accuracy": 0.3, "top5_accuracy": 0.8}
    return result({f"K = {K}": {"cell": {"K": K}, **cell} for K in (10.0, 12.0)}, data={"test": IMAGES})


def timing() -> dict[str, Any]:
    return result({"ds_resnet34": {"step": {"Normalizer": {"ratio": {**QUARTILES}}}}})


MADE = {
    "tightness": tightness, "pretrained": pretrained, "cifar-grid": grid, "imagenet": imagenet, "timing": timing,
}  # fmt: skip
AGAIN = 0.03 + 3 * math.sqrt(2 * 0.25 / IMAGES)  # at p = ½


def changed(name: str, where: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The result of an experiment with another value in one cell."""
    made = MADE[name]()
    inside = made["cells"]
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    return made


def test_every_experiment_states_its_noise() -> None:
    assert EXPERIMENTS.keys() == NOISE.keys() == GAPS.keys() == MADE.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
class TestOfEvery:
    def test_the_same_is_not_apart(self, name: str) -> None:
        assert apart(name, MADE[name](), MADE[name]()) == []

    def test_a_cell_that_one_lacks_is(self, name: str) -> None:
        less = MADE[name]()
        cell = [*less["cells"]][-1]
        del less["cells"][cell]
        for pair in ((less, MADE[name]()), (MADE[name](), less)):
            assert apart(name, *pair) == [f"{cell}: only in one of the two"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"profile": "paper"}, "another profile"),
            ({"settings": {"seed": 1}}, "another seed"),
            ({"data": {"test": 3}}, "another data"),
            ({"sha256": "d"}, "another sha256"),
        ],
    )
    def test_what_is_something_else_is_refused(self, name: str, change: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            apart(name, MADE[name](), MADE[name]() | change)

    def test_where_the_data_lie_does_not_matter(self, name: str) -> None:
        elsewhere = MADE[name]() | {"settings": {"seed": 0, "data_path": "there"}}
        assert apart(name, MADE[name](), elsewhere) == []


@pytest.mark.parametrize(
    ("name", "where", "value", "noise"),
    [
        ("tightness", ("3×3, N = 7", "paper", "median"), 0.02 + 9e-5, True),
        ("tightness", ("3×3, N = 7", "paper", "median"), 0.02 - 11e-5, False),
        ("pretrained", ("first", "over", "auto"), 9e-5, True),
        ("pretrained", ("first", "over", "auto"), 11e-5, False),
        ("pretrained", ("first", "over", "auto"), "nan", False),
        ("pretrained", ("first", "norm"), 40.03, True),
        ("pretrained", ("first", "norm"), 40.05, False),
        ("pretrained", ("first", "over"), {"auto": 0.0}, False),
        ("cifar-grid", ("1e_3", "test_accuracy"), 0.5 + 0.99 * AGAIN, True),
        ("cifar-grid", ("1e_3", "test_accuracy"), 0.5 - 1.01 * AGAIN, False),
        ("imagenet", ("K = 10.0", "test_accuracy"), 0.34, True),
        ("imagenet", ("K = 10.0", "test_accuracy"), 0.36, False),
        ("imagenet", ("K = 12.0", "top5_accuracy"), 0.75, False),
        ("imagenet", ("K = 12.0", "status"), "diverged", False),
        ("timing", ("ds_resnet34", "step", "Normalizer", "ratio"), {"low": 1.069, "median": 1.1, "high": 1.2}, True),
        ("timing", ("ds_resnet34", "step", "Normalizer", "ratio"), {"low": 1.071, "median": 1.1, "high": 1.2}, False),
        ("timing", ("ds_resnet34", "step", "Normalizer", "ratio"), {"low": 0.99, "median": 1.0, "high": 1.001}, True),
        ("timing", ("ds_resnet34", "step", "Normalizer", "ratio"), {"low": 0.99, "median": 0.99, "high": 0.99}, False),
    ],
)
def test_how_far_a_value_may_be_off(name: str, where: tuple[str, ...], value: Any, noise: bool) -> None:
    other = changed(name, where, value)
    for pair in ((MADE[name](), other), (other, MADE[name]())):
        found = apart(name, *pair)
        assert (found == []) == noise
        assert noise or (len(found) == 1 and found[0].startswith(where[0]))


@pytest.mark.parametrize(
    ("first", "again", "noise"),
    [
        ({"1e_4": 0.4, "1e_3": 0.5, "1e_2": None}, {"1e_4": 0.4, "1e_3": None, "1e_2": None}, True),
        ({"1e_4": 0.4, "1e_3": 0.5, "1e_2": 0.6}, {"1e_4": 0.4, "1e_3": None, "1e_2": 0.6}, False),
        ({"1e_4": 0.4, "1e_3": 0.5, "1e_2": 0.6}, {"1e_4": 0.4, "1e_3": None, "1e_2": None}, False),
        ({"1e_4": 0.4, "1e_3": None, "1e_2": None}, {"1e_4": None, "1e_3": None, "1e_2": None}, True),
        ({"1e_4": None}, {"1e_4": None}, True),
    ],
)
def test_a_run_may_diverge_at_the_largest_rate_alone(first: Any, again: Any, noise: bool) -> None:
    for pair in ((trained(**first), trained(**again)), (trained(**again), trained(**first))):
        assert (apart("cifar-grid", *pair) == []) == noise


class TestCommand:
    @pytest.fixture
    def argv(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Two folders with the same results; lines of the table are not broken."""
        monkeypatch.setenv("COLUMNS", "200")
        for folder in ("committed", "again"):
            (tmp_path / folder).mkdir()
            for name, make in MADE.items():
                (tmp_path / folder / f"{name}.json").write_text(json.dumps(make()))
        return ["compare", str(tmp_path / "again"), "--out", str(tmp_path / "committed")]

    def test_what_is_within_ends_well(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        Path(argv[1], "tightness.json").write_text(
            json.dumps(changed("tightness", ("3×3, N = 7", "paper", "low"), 0.01005))
        )
        assert paper.main(argv) == 0
        shown = capsys.readouterr().out
        assert shown.count("within") == 5 and shown.count("equal") == 4
        (line,) = (line for line in shown.splitlines() if "tightness" in line)
        assert all(text in line for text in ("2", "5e-05", "0.0001", "3×3, N = 7, paper, low"))

    def test_what_is_apart_is_named_and_ends_with_1(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        Path(argv[1], "cifar-grid.json").write_text(json.dumps(changed("cifar-grid", ("1e_4", "test_accuracy"), 0.1)))
        assert paper.main(argv) == 1
        shown = capsys.readouterr().out
        assert shown.count("within") == 4 and "cifar-grid: 1e_4, test_accuracy: 0.3 apart, where 0.04" in shown

    def test_what_only_one_has_is_said(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        Path(argv[1], "timing.json").unlink()
        assert paper.main(argv) == 0
        assert "not compared" in capsys.readouterr().out

    def test_what_cannot_be_compared_is_one_line(
        self, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("opnorm", lambda: paper.main([*argv[:1], str(tmp_path / "nowhere"), *argv[2:]])) == 2
        assert "got none" in capsys.readouterr().err
        Path(argv[1], "timing.json").write_text(json.dumps(MADE["timing"]() | {"profile": "paper"}))
        assert run("opnorm", lambda: paper.main(argv)) == 2
        assert "expected two results of timing with the same profile" in capsys.readouterr().err
        Path(argv[1], "timing.json").write_text("{")
        assert run("opnorm", lambda: paper.main(argv)) == 2
        assert "expected the JSON of a result" in capsys.readouterr().err
