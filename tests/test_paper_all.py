"""`opnorm reproduce all`: every experiment in order, what is missing is said first, a kill loses no finished one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the extra lab is not installed")

from matplotlib.figure import Figure

from opnorm.lab import paper
from opnorm.lab.cli import Command, UsageError, run
from opnorm.lab.paper import everything
from opnorm.lab.paper.cells import compute, forget_part
from opnorm.lab.paper.figures import FIGURES
from opnorm.lab.paper.options import Options, read_options
from opnorm.lab.paper.sections import SECTIONS

ROOT = Path(__file__).parents[1]
NAMES = ("first", "second", "third")


class Killed(BaseException):
    """What a kill looks like from inside."""


@dataclass
class World:
    """Three experiments of two cells each, and what they did."""

    seen: list[str]
    stop_at: str | None = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World([])
    monkeypatch.setattr(everything, "keep_memory", lambda arguments: None)  # it would replace this process
    for name in NAMES:
        monkeypatch.setitem(sys.modules, f"experiment_{name}", experiment(name, made))
        monkeypatch.setitem(FIGURES, name, lambda result: Figure())
        monkeypatch.setitem(SECTIONS, name, lambda result: f"## {len(result['cells'])} cells of {result['profile']}")
    known = {name: Command(f"experiment_{name}", f"the {name} one") for name in NAMES}
    monkeypatch.setattr(paper, "EXPERIMENTS", known)
    monkeypatch.setattr(everything, "EXPERIMENTS", known)
    return made


def experiment(name: str, world: World) -> ModuleType:
    """A module such as those of the package; the second experiment needs weights."""
    module: Any = ModuleType(f"experiment_{name}")

    def cell(number: int) -> int:
        if f"{name} {number}" == world.stop_at:
            raise Killed
        world.seen.append(f"{name} {number}")
        return number

    def main(argv: Sequence[str]) -> int:
        options = read_options(module.Own, argv, f"opnorm reproduce {name}", module.PROFILES)
        plan = {str(number): lambda number=number: cell(number) for number in (1, 2)}
        compute(name, options, ["reproduce", name, *argv], plan, profiles=module.PROFILES)
        forget_part(options.out, name)
        return 0

    def check(options: Any) -> None:
        if options.weights is None:
            raise UsageError("expected --weights FILE, got none")

    module.PROFILES, module.main = {"small": {}, "paper": {}}, main
    if name == "second":
        module.Own, module.check = _Weighted, check
    else:
        module.Own = _Plain
    module.Own = dataclass(frozen=True)(type(f"Own{name.title()}", (module.Own,), {"__module__": module.__name__}))
    return module


@dataclass(frozen=True)
class _Plain(Options):
    """An experiment for tests."""


@dataclass(frozen=True)
class _Weighted(Options):
    """An experiment for tests that needs weights."""

    weights: Path | None = None
    """Weights."""


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "results.md").write_text("# Results\n")
    return ["all", "--out", str(tmp_path / "out"), "--docs", str(tmp_path), "--weights", "weights.safetensors"]


EACH = [f"{name} {number}" for name in NAMES for number in (1, 2)]


def test_it_runs_each_in_order_and_ends_with_the_page(world: World, argv: list[str], tmp_path: Path) -> None:
    assert paper.main(argv) == 0
    assert world.seen == EACH
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f"{name}.json" for name in NAMES}
    assert {file.name for file in (tmp_path / "img" / "results").iterdir()} == {f"{name}.svg" for name in NAMES}
    page = (tmp_path / "results.md").read_text()
    assert re.findall(r"<!-- begin (\w+) -->\n## 2 cells of small", page) == [*NAMES]
    second = json.loads((tmp_path / "out" / "second.json").read_text())["environment"]["command"]
    assert "--weights weights.safetensors" in second


@pytest.mark.parametrize("stop_at", EACH)
def test_a_kill_loses_one_cell(world: World, argv: list[str], stop_at: str, capsys: pytest.CaptureFixture[str]) -> None:
    world.stop_at = stop_at
    with pytest.raises(Killed):
        paper.main(argv)
    world.stop_at = None
    capsys.readouterr()
    assert paper.main(argv) == 0
    assert world.seen == EACH
    assert capsys.readouterr().out.count("finished before") == EACH.index(stop_at) // 2


def test_results_of_another_time_are_made_anew(world: World, argv: list[str]) -> None:
    for _ in range(2):
        assert paper.main(argv) == 0
    assert world.seen == EACH * 2


def test_a_kill_before_the_page_leaves_the_page_alone_to_do(
    world: World, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(everything, "draw", dying)
        with pytest.raises(Killed):
            paper.main(argv)
    assert paper.main(argv) == 0
    assert world.seen == EACH and "<!-- begin third -->" in (tmp_path / "results.md").read_text()


def test_restart_forgets_and_so_does_another_profile(world: World, argv: list[str]) -> None:
    for more in (["--restart"], ["--profile", "paper"]):
        world.seen.clear()
        world.stop_at = "third 2"
        with pytest.raises(Killed):
            paper.main(argv)
        world.stop_at = None
        assert paper.main([*argv, *more, "--without", "third"]) == 0
        assert world.seen == EACH[:5] + EACH[:4]
        forget_part(Path(argv[2]), "third")


def test_what_is_missing_is_said_before_anything_begins(
    world: World, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, code in (([], 2), (["--without", "fourth"], 2), (["--without", "second"], 0)):
        assert run("opnorm", lambda more=more: paper.main([*argv[:5], *more])) == code
        if code:
            assert not world.seen and not (tmp_path / "out").exists()
    err = capsys.readouterr().err
    assert "second: expected --weights FILE, got none. Give it, or --without second" in err
    assert "expected --without among first, second, third, got fourth" in err
    assert world.seen == EACH[:2] + EACH[4:]


def test_an_experiment_that_fails_ends_it(world: World, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["experiment_second"], "main", lambda argv: 3)
    assert paper.main(argv) == 3
    assert world.seen == EACH[:2]


def test_the_experiments_of_the_package_can_be_asked_what_they_need(tmp_path: Path) -> None:
    for name in paper.EXPERIMENTS:
        module = everything._module(name)
        assert issubclass(everything._kind(module), Options)
        assert module.PROFILES.keys() == {"small", "paper"}
        assert name == module.WHAT


@pytest.mark.slow
def test_a_real_kill_in_the_midst_of_an_experiment(tmp_path: Path) -> None:
    sizes = [str(n) for n in range(5, 25)]
    command = [sys.executable, "-m", "opnorm", "reproduce", "tightness", "--kernels", "20", "--sizes", *sizes]
    command += ["--larger", "5", "--volumes", "3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}

    def start(out: Path) -> subprocess.Popen[bytes]:
        words = [*command, "--out", str(out), "--docs", str(out)]
        return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    part, killed = tmp_path / "killed" / "tightness.part.json", start(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while not part.is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = json.loads(part.read_text())["cells"]
    assert 0 < len(done) < len(sizes) + 4
    assert start(tmp_path / "killed").wait() == 0
    whole, again = (json.loads((tmp_path / name / "tightness.json").read_text()) for name in ("whole", "killed"))
    assert {name: again["cells"][name] for name in done} == done
    assert again["cells"].keys() == whole["cells"].keys()
    for name, cell in whole["cells"].items():
        assert again["cells"][name]["paper"] == pytest.approx(cell["paper"], abs=2e-5), name
