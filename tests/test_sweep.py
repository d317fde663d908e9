"""`opnorm sweep`: what a grid file stands for, how a sweep goes on, fails and stops, and what it shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")
pytest.importorskip("yaml", reason="the extra sweep is not installed")

from filelock import FileLock

from opnorm.lab.cli import UsageError, main
from opnorm.lab.sweep_board import Board
from opnorm.lab.sweep_grid import arguments_of, name_of, read_grid, runs_of
from opnorm.lab.sweep_show import figure_of, panels_of, tables_of
from opnorm.lab.sweep_state import Entry, entries_of
from opnorm.lab.train_config import Train, read_config
from sweep_stage import Died, NoMemory, Play, Stage

EXAMPLES = Path(__file__).parents[1] / "examples"
GRID = {"run": {"epochs": 1, "arg": ["width=5"]}, "grid": {"K": [1, 2], "lr": [0.02, 0.002]}}
FILE = """
run: {epochs: 1, arg: [width=5], batch_size: 257}
grid:
  K: [1, 2]
  lr: [0.02, 0.002]
"""
LIMIT = 600.0  # seconds for anything that is waited for


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a grid file, to work in."""
    (tmp_path / "grid.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def rows_of(folder: Path | str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((Path(folder) / "sweep.json").read_text())["rows"]
    return rows


class TestGrid:
    def test_every_combination_is_a_run_the_last_setting_fastest(self) -> None:
        runs = runs_of(GRID)
        assert [run.name for run in runs] == ["K1-lr0.02", "K1-lr0.002", "K2-lr0.02", "K2-lr0.002"]
        assert [run.cell for run in runs[:2]] == [{"K": 1.0, "lr": 0.02}, {"K": 1.0, "lr": 0.002}]
        assert runs[3].config == read_config(["--epochs", "1", "--arg", "width=5", "--K", "2", "--lr", "0.002"])

    def test_settings_are_arguments(self) -> None:
        settings = {
            "preset": "digits", "arg": ["width=5", "depth=2"], "normalize": False, "overwrite": False, "K": 5,
            "radii": [0, 0.5], "lr": "1e-3", "data_path": None, "milestones": [],
        }  # fmt: skip
        assert arguments_of({k: v for k, v in settings.items() if k != "overwrite"}) == [
            "--preset", "digits", "--arg", "width=5", "--arg", "depth=2", "--no-normalize", "--K", "5",
            "--radii", "0", "0.5", "--lr", "1e-3", "--milestones",
        ]  # fmt: skip

    def test_the_default_of_a_preset_holds_where_nothing_is_said(self) -> None:
        (run,) = runs_of({"run": {"preset": "paper-imagenet"}, "grid": {"K": [40]}})
        assert (run.config.lr, run.config.s_init, run.config.epochs) == (3e-4, 0.5, 150)

    @pytest.mark.parametrize(
        ("cell", "name"),
        [
            ({"K": 5.0, "scaling": "hard"}, "K5-hard"),
            ({"lr": 1e-05, "arg": ("width=5", "depth=2")}, "lr1e-05-argwidth=5,depth=2"),
            ({"model": "my/zoo.py:make", "normalize": False}, "my_zoo.py_make-normalizeFalse"),
            ({"model": "../x"}, "_x"),
        ],
    )
    def test_names_are_folders(self, cell: dict[str, Any], name: str) -> None:
        assert name_of(cell) == name

    def test_the_examples_are_grids(self) -> None:
        assert len(read_grid(EXAMPLES / "sweep_digits.yaml")) == 9
        runs = read_grid(EXAMPLES / "sweep_paper_cifar10.yaml")
        assert len({run.name for run in runs}) == len(runs) == 100
        assert {(run.config.epochs, run.config.model, run.config.data) for run in runs} == {
            (300, "ds_resnet34", "cifar10")
        }
        assert {run.config.lr for run in runs} == {1e-5, 1e-4, 1e-3, 1e-2, 1e-1}  # which YAML reads as text

    def test_set_replaces_what_the_file_says(self, place: Path) -> None:
        runs = read_grid(Path("grid.yaml"), ["epochs=7", "K=[3]", "scaling=soft", "arg=[width=6]", "normalize=true"])
        assert [run.cell["K"] for run in runs] == [3.0, 3.0]
        found = {(run.config.epochs, run.config.scaling, run.config.arg) for run in runs}
        assert found == {(7, "soft", ("width=6",))}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("epochs", "expected --set KEY=VALUE, such as epochs=10, got 'epochs'"),
            ("K=5", "expected a list under grid: K, got 5"),
            ("lr=[", "with a value as in YAML"),
            ("epoch=3", "expected a setting of opnorm train, got 'epoch'; perhaps you meant epochs"),
            ("epochs=", "expected a number or a text for epochs, got None"),
            ("epochs=many", "the run with K: 1, lr: 0.02"),
        ],
    )
    def test_wrong_changes(self, place: Path, change: str, message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            read_grid(Path("grid.yaml"), [change])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1], "expected a grid with the parts run: and grid:, settings of opnorm train by name, got list"),
            (None, "got NoneType"),
            ({"run": {}, "grid": {"K": [1]}, "more": 1}, "got the part more"),
            ({"run": {"K": 1}}, "in grid: at least one list, such as K: [1, 2, 5]"),
            ({"grid": {}}, "at least one list"),
            ({"run": [1], "grid": {"K": [1]}}, "at least one list"),
            ({"grid": {"K": []}}, "expected a list under grid: K, got []"),
            ({"grid": {"K": 3}}, "expected a list under grid: K, got 3"),
            ({"grid": {"k": [1]}}, "expected a setting of opnorm train, got 'k'"),
            ({"grid": {1: [1]}}, "expected a setting of opnorm train, got 1"),
            ({"run": {"learning_rate": 1}, "grid": {"K": [1]}}, "got 'learning_rate'"),
            ({"run": {"K": 1}, "grid": {"K": [1]}}, "in run: or in grid:, got K in both"),
            ({"grid": {"out": ["a"]}}, "expected settings without out, which is for the sweep to say"),
            ({"run": {"devices": 2}, "grid": {"K": [1]}}, "expected settings without devices"),
            ({"grid": {"workers": [1, 2]}}, "expected workers in run:, since it does not change what is computed"),
            ({"grid": {"data_path": ["a", "b"]}}, "expected data_path in run:"),
            ({"grid": {"normalize": ["no"]}}, "expected true or false for normalize, got 'no'"),
            ({"grid": {"radii": [0.1]}}, "expected a list of numbers or texts for radii, got 0.1"),
            ({"grid": {"K": [True]}}, "expected a number or a text for K, got True"),
            ({"grid": {"K": [[1]]}}, "expected a number or a text for K, got [1]"),
            ({"grid": {"model": ["--overwrite"]}}, "expected a number or a text for model"),
            ({"grid": {"K": [1, -1]}}, "expected --K above 0 and finite, got -1.0 (the run with K: -1)"),
            ({"grid": {"scaling": ["hard", "weak"]}}, "(the run with scaling: weak)"),
            ({"grid": {"K": [1, 1.0]}}, "expected different values under grid: K, got [1, 1.0]"),
            ({"grid": {"lr": [0.01, "1e-2"]}}, "expected different values under grid: lr"),
        ],
    )
    def test_wrong_grids(self, content: Any, message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            runs_of(content)

    def test_a_file_that_is_no_yaml_is_named(self, place: Path) -> None:
        Path("bad.yaml").write_text("grid: [1\n")
        Path("bytes.yaml").write_bytes(b"\xff\xfe\xfa")
        Path("odd.yaml").write_text("grid: {K: 1}")
        expected = {
            "bad.yaml": "expected YAML in bad.yaml, got: ",
            "bytes.yaml": "expected YAML in bytes.yaml, got: ",
            "none.yaml": "expected the grid as a YAML file, got none.yaml: No such file",
            "odd.yaml": "odd.yaml: expected a list under grid: K",
        }
        for name, message in expected.items():
            with pytest.raises(UsageError, match=re.escape(message)):
                read_grid(Path(name))


def ended(folder: Path, config: Train, status: str = "finished", **more: Any) -> None:
    """Leave what a run leaves that has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"config": config.to_dict()}))
    environment = {"command": f"opnorm train --out {folder}", "commit": "abc", "threads": 1, "gpu": None}
    result = {"status": status, "reason": None, "config": config.to_dict(), "environment": environment}
    history = [{"epoch": 1, "test_accuracy": 0.5}]
    found = {"test_accuracy": 0.5, "bound": 2.0} if status == "finished" else {}
    (folder / "result.json").write_text(json.dumps(result | found | {"seconds": 1.0, "history": history} | more))


class TestEntries:
    def test_a_run_keeps_its_folder(self, tmp_path: Path) -> None:
        runs = runs_of(GRID)
        ended(tmp_path / "renamed", runs[1].config)
        folders = [entry.folder.name for entry in entries_of(runs, tmp_path)]
        assert folders == ["K1-lr0.02", "renamed", "K2-lr0.02", "K2-lr0.002"]

    def test_other_settings_get_another_folder(self, tmp_path: Path) -> None:
        for run in runs_of(GRID):
            ended(tmp_path / run.name, run.config)
        longer = entries_of(runs_of(GRID, ["epochs=2"]), tmp_path)
        assert [entry.folder.name for entry in longer][:2] == ["K1-lr0.02-2", "K1-lr0.002-2"]
        assert not any(entry.settle() for entry in longer)
        elsewhere = entries_of(runs_of(GRID, ["workers=3", "checkpoint_every=1"]), tmp_path)
        assert all(entry.settle() for entry in elsewhere)  # the same, computed in another way

    def test_a_run_of_another_version_is_left_alone(self, tmp_path: Path) -> None:
        run = runs_of(GRID)[0]
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "config.json").write_text(json.dumps({"config": {"unheard_of": 1}}))
        assert entries_of([run], tmp_path)[0].folder.name == f"{run.name}-2"

    def test_it_is_begun_once_and_then_resumed(self, tmp_path: Path) -> None:
        run = runs_of({"run": {"workers": 2, "epochs": 3}, "grid": {"K": [2]}})[0]
        entry = Entry(run, tmp_path / "K2")
        begin = ["--workers", "2", "--epochs", "3", "--K", "2", "--out", str(entry.folder)]
        assert entry.begin() == begin and entry.tries == 1
        (entry.folder / "config.json").write_text(json.dumps({"config": run.config.to_dict()}))
        assert entry.begin() == ["--workers", "2", "--resume", str(entry.folder)] and entry.tries == 2

    def test_a_result_of_other_settings_is_none(self, tmp_path: Path) -> None:
        run, other = runs_of(GRID)[:2]
        entry = Entry(run, tmp_path)
        assert not entry.settle()
        ended(tmp_path, other.config)
        assert not entry.settle()
        (tmp_path / "result.json").write_text("{")
        assert not entry.settle() and entry.row()["test_accuracy"] is None
        ended(tmp_path, run.config)
        assert entry.settle() and (entry.status, entry.accuracy, entry.epoch) == ("finished", 0.5, 1)

    def test_it_is_looked_at_while_it_runs(self, tmp_path: Path) -> None:
        entry = Entry(runs_of(GRID)[0], tmp_path)
        entry.begin()
        assert not entry.begun()
        entry.output.write_text("$ opnorm train\n")
        assert entry.begun()
        log = tmp_path / "log.jsonl"
        log.write_text('{"epoch": 1, "test_accuracy": 0.25}\n')
        entry.look()
        assert (entry.epoch, entry.accuracy) == (1, 0.25)
        log.write_text('{"epoch": 1, "test_accuracy": 0.25}\n{"epoch": 2, "te')  # as it is being written
        entry.look()
        assert (entry.epoch, entry.accuracy) == (1, 0.25)
        assert (entry.row()["status"], entry.row()["epochs"]) == ("waiting", 1)

    @pytest.mark.parametrize(
        ("printed", "words"),
        [
            ("", "it printed nothing"),
            ("first\n  last  \n\n", "last"),
            ("begin\nFatal Python error: Aborted\n\nStack:\n  File x\n", "Fatal Python error: Aborted"),
        ],
    )
    def test_last_words_are_of_this_try(self, tmp_path: Path, printed: str, words: str) -> None:
        entry = Entry(runs_of(GRID)[0], tmp_path)
        entry.output.write_text("of the try before\n")
        entry.begin()
        with open(entry.output, "a") as file:
            file.write(printed)
        assert entry.last_words() == words


@pytest.fixture
def stage(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], Stage]:
    """Have the sweeps of a test run on a stage."""
    return lambda play: Stage(play).enter(monkeypatch)


def finish(folder: Path, config: Train) -> int:
    ended(folder, config)
    return 0


class TestSweep:
    """The course of a sweep, where what the runs do is played."""

    def test_what_has_ended_is_kept(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        first = stage(finish)
        assert main(["sweep", "grid.yaml"]) == 0
        assert [row["status"] for row in rows_of("sweeps/grid")] == ["finished"] * 4
        assert "50.00*" in capsys.readouterr().out and len(first.tasks) == 4
        before = json.loads(Path("sweeps/grid/sweep.json").read_text())
        again = stage(finish)
        assert main(["sweep", "grid.yaml"]) == 0 and not again.tasks
        assert json.loads(Path("sweeps/grid/sweep.json").read_text()) == before  # its command too
        more = stage(finish)
        assert main(["sweep", "grid.yaml", "--set", "K=[1,2,5]"]) == 0
        assert [argv[-1] for argv in more.tasks] == ["sweeps/grid/K5-lr0.02", "sweeps/grid/K5-lr0.002"]

    def test_what_a_kill_left_half_written_is_removed(self, stage: Any) -> None:
        Path("out").mkdir()
        for name in ("sweep.json", "sweep.png"):
            Path("out", f"{name}.1.part").write_bytes(b"half")
        stage(finish)
        assert main(["sweep", "grid.yaml", "--out", "out"]) == 0
        assert not [*Path("out").glob("*.part")]

    def test_an_interrupted_run_goes_on(self, stage: Any) -> None:
        run = read_grid(Path("grid.yaml"))[2]
        folder = Path("out", run.name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"config": run.config.to_dict()}))
        stages = stage(finish)
        assert main(["sweep", "grid.yaml", "--out", "out"]) == 0
        assert [argv[-2:] for argv in stages.tasks if "--resume" in argv] == [["--resume", str(folder)]]

    def test_a_run_that_fails_is_tried_again(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        failures = {"K1-lr0.02": 1, "K2-lr0.02": 9}

        def play(folder: Path, config: Train) -> int | Exception:
            failures[folder.name] = failures.get(folder.name, 0) - 1
            if failures[folder.name] < 0:
                return finish(folder, config)
            with open(folder / "output.log", "a") as log:
                log.write("ValueError: an unlucky day\n")
            return 1 if folder.name == "K2-lr0.02" else Died()

        stages = stage(play)
        assert main(["sweep", "grid.yaml", "--out", "out", "--retries", "2"]) == 1
        out, err = capsys.readouterr()
        tries = [Path(argv[-1]).name for argv in stages.tasks]
        assert {name: tries.count(name) for name in tries} == {
            "K1-lr0.02": 2, "K1-lr0.002": 1, "K2-lr0.02": 3, "K2-lr0.002": 1
        }  # fmt: skip
        assert "K1-lr0.02 failed and goes on: its process died after: ValueError: an unlucky day" in out
        reason = "exit code 1: ValueError: an unlucky day"
        assert err == f"failed: K2-lr0.02: {reason}; see out/K2-lr0.02/output.log\n"
        assert [(row["status"], row["reason"]) for row in rows_of("out")] == [
            ("finished", None), ("finished", None), ("failed", reason), ("finished", None)
        ]  # fmt: skip
        assert "failed" in out.splitlines()[-2]  # its cell of the table
        healed = stage(finish)
        assert main(["sweep", "grid.yaml", "--out", "out"]) == 0 and len(healed.tasks) == 1

    def test_a_run_with_wrong_values_is_not(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        stages = stage(lambda folder, config: 2)
        assert main(["sweep", "grid.yaml", "--retries", "5"]) == 1
        assert len(stages.tasks) == 4
        assert capsys.readouterr().err.count("exit code 2: it printed nothing") == 4

    def test_without_memory_it_is_said(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        stage(lambda folder, config: NoMemory())
        assert main(["sweep", "grid.yaml", "--retries", "0"]) == 1
        assert "it was killed, since the machine had no memory left" in capsys.readouterr().err

    def test_a_run_that_diverged_is_a_result(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        def play(folder: Path, config: Train) -> int:
            ended(folder, config, "diverged", reason="the loss is nan in step 3")
            return 3

        stages = stage(play)
        assert main(["sweep", "grid.yaml"]) == 0 and len(stages.tasks) == 4
        assert {(row["status"], row["reason"]) for row in rows_of("sweeps/grid")} == {
            ("diverged", "the loss is nan in step 3")
        }
        out, err = capsys.readouterr()
        assert "4 of 4 ended: 4 diverged" in out and not err
        assert not stage(finish).tasks and main(["sweep", "grid.yaml"]) == 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_stops_it_and_it_goes_on(
        self, stage: Any, number: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def play(folder: Path, config: Train) -> int:
            os.kill(os.getpid(), number)  # while the first run is finished
            return finish(folder, config)

        handler = signal.getsignal(number)  # where a shell runs the suite in the background, SIGINT is ignored
        stages = stage(play)
        assert main(["sweep", "grid.yaml"]) == 128 + number
        assert stages.cancelled == [3, 2, 1]  # those first that have not begun
        assert [row["status"] for row in rows_of("sweeps/grid")] == ["finished", "stopped", "stopped", "stopped"]
        out, err = capsys.readouterr()
        assert "opnorm sweep: stopped with 3 runs to go; opnorm sweep grid.yaml goes on" in out and not err
        rest = stage(finish)
        assert main(["sweep", "grid.yaml"]) == 0 and len(rest.tasks) == 3
        assert signal.getsignal(number) is handler

    def test_data_and_model_are_looked_at_once(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        stages = stage(finish)
        for change, message in (
            ("model=nothing", "expected MODEL as one of"),
            ("data=cifar10", "expected data_batch_1.bin"),
            ("arg=[with=5]", "expected the arguments of ds_convnet"),
        ):
            changes = [change, "data_path=."] if "data" in change else [change]
            assert main(["sweep", "grid.yaml", *(word for text in changes for word in ("--set", text))]) == 2
            err = capsys.readouterr().err
            assert message in err and err.count("\n") == 1
        assert not stages.tasks

    def test_two_sweeps_in_a_folder_are_refused(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        stages = stage(finish)
        Path("out").mkdir()
        with FileLock("out/.lock"):
            assert main(["sweep", "grid.yaml", "--out", "out"]) == 2
        assert capsys.readouterr().err.startswith("opnorm sweep: expected a folder that no other sweep works in")
        assert not stages.tasks and main(["sweep", "grid.yaml", "--out", "out"]) == 0

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ([], "expected GRID.yaml, or --show FOLDER, got neither"),
            (["grid.yaml", "--show", "."], "expected GRID.yaml, or --show FOLDER, got both"),
            (["grid.yaml", "--cpus-per-run", "0"], "expected --cpus-per-run of at least 1, got 0"),
            (["grid.yaml", "--gpus-per-run", "1.5"], "expected --gpus-per-run from 0 to 1, or a whole number, got 1.5"),
            (["grid.yaml", "--gpus-per-run", "inf"], "got inf"),
            (["grid.yaml", "--gpus-per-run", "nan"], "got nan"),
            (["grid.yaml", "--retries", "-1"], "expected --retries of at least 0, got -1"),
            (["grid.yaml", "--out", "grid.yaml"], "expected --out as a folder, got grid.yaml, which is a file"),
            (["grid.yaml", "--speed", "9"], "--speed"),
            (["--show", "nowhere"], "expected --show with the folder of a sweep or its sweep.json, got nowhere"),
            (["--show", "grid.yaml"], "expected the results of a sweep in grid.yaml, got something else"),
        ],
    )
    def test_wrong_values_are_one_line(
        self, stage: Any, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stages = stage(finish)
        assert main(["sweep", *argv]) == 2
        err = capsys.readouterr().err
        assert message in err and err.startswith("opnorm sweep: ") and err.count("\n") == 1
        assert not stages.tasks

    def test_help_has_an_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["sweep", "--help"]) == 0
        assert "opnorm sweep examples/sweep_digits.yaml" in capsys.readouterr().out


def row(K: float, scaling: str, accuracy: float | None, status: str = "finished") -> dict[str, Any]:
    return {"cell": {"K": float(K), "scaling": scaling}, "status": status, "test_accuracy": accuracy}


RESULT = {
    "grid": {"K": [1.0, 2.0, 5.0], "scaling": ["hard", "soft"]},
    "rows": [
        row(2, "soft", 0.75), row(1, "hard", 0.5), row(1, "soft", 0.5), row(2, "hard", 0.125),
        row(5, "hard", None, "diverged"), row(5, "soft", None, "failed"),
    ],
}  # fmt: skip


class TestShown:
    def test_a_table_is_the_grid_whatever_the_order_of_the_rows(self) -> None:
        (panel,) = panels_of(RESULT)
        assert (panel.title, panel.down, panel.across) == ("", "K", "scaling")
        assert panel.labels == (["1", "2", "5"], ["hard", "soft"])
        assert [[cell["test_accuracy"] for cell in line] for line in panel.cells] == [
            [0.5, 0.5], [0.125, 0.75], [None, None]
        ]  # fmt: skip
        assert [panel.best(i) for i in range(3)] == [0, 1, None]

    def test_a_grid_of_one_is_a_line_and_of_three_some_tables(self) -> None:
        rows = [{"cell": {"K": k}, "status": "finished", "test_accuracy": k / 10} for k in (1, 2)]
        (panel,) = panels_of({"grid": {"K": [1, 2]}, "rows": rows})
        assert panel.labels == (["accuracy"], ["1", "2"]) and panel.best(0) == 1
        grid = {"K": [1, 2], "lr": [0.1], "scaling": ["hard", "soft"], "seed": [0, 1, 2]}
        cells = [
            {"K": k, "lr": 0.1, "scaling": s, "seed": n} for k in (1, 2) for s in ("hard", "soft") for n in range(3)
        ]
        many = {"grid": grid, "rows": [{"cell": c, "status": "waiting", "test_accuracy": None} for c in cells]}
        assert [p.title for p in panels_of(many)][:4] == [
            "scaling hard, seed 0", "scaling hard, seed 1", "scaling hard, seed 2", "scaling soft, seed 0"
        ]  # fmt: skip
        assert len(figure_of(many).axes) == 2 * 4 + 1  # six panels in two lines, and the colours

    def test_the_text_says_what_each_cell_is(self) -> None:
        (table,) = tables_of(RESULT)
        assert [[*column.cells] for column in table.columns] == [
            ["1", "2", "5"], ["50.00*", "12.50 ", "diverged "], ["50.00 ", "75.00*", "failed "]
        ]  # fmt: skip
        assert table.columns[0].header == "K \\ scaling"

    def test_the_heat_map_says_the_same(self) -> None:
        figure = figure_of(RESULT)
        axes = figure.axes[0]
        assert [text.get_text() for text in axes.texts] == ["50.00", "50.00", "12.50", "75.00", "×", "!"]
        (image,) = axes.get_images()
        assert image.get_array().filled(-1).tolist() == [[50, 50], [12.5, 75], [-1, -1]]
        assert image.get_clim() == (12.5, 75)
        boxes = [(round(patch.get_x()), round(patch.get_y())) for patch in axes.patches]
        assert boxes == [(0, 0), (1, 1)]  # column and row of the best
        assert "×: diverged; !: failed" in figure.get_supxlabel()

    def test_it_is_drawn_before_anything_is_known(self, tmp_path: Path) -> None:
        rows = [row(k, s, None, "waiting") for k in (1, 2, 5) for s in ("hard", "soft")]
        figure_of(RESULT | {"rows": rows}).savefig(tmp_path / "x.png")
        (table,) = tables_of(RESULT | {"rows": rows})
        assert [*table.columns[1].cells] == ["– "] * 3

    def test_show_draws_it_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "sweep.json").write_text(json.dumps(RESULT))
        for path in (tmp_path, tmp_path / "sweep.json"):
            assert main(["sweep", "--show", str(path)]) == 0
            out = capsys.readouterr().out
            assert "75.00*" in out and str(tmp_path / "sweep.png") in out
            assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
            (tmp_path / "sweep.png").unlink()

    def test_the_board_counts(self, tmp_path: Path) -> None:
        entries = [Entry(run, tmp_path / run.name) for run in runs_of(GRID, ["epochs=2"])]
        board = Board(entries)
        assert board.summary() == "0 of 4 ended"
        for entry, status in zip(entries, ("finished", "diverged", "failed"), strict=False):
            entry.status = status
        entries[0].epoch = 2
        assert re.fullmatch(r"3 of 4 ended: 1 finished, 1 diverged, 1 failed; \d:\d\d left", board.summary())


MODELS = """
import os
import time
from pathlib import Path
from torch import nn

class Odd(nn.Sequential):
    def forward(self, x):
        if self.training and not Path("passed").exists():
            Path("passed").touch()
            os.abort()
        return super().forward(x)

class Held(nn.Sequential):
    def forward(self, x):
        while self.training and Path("held").exists():
            time.sleep(0.01)
        return super().forward(x)

def make(kind="plain"):
    return {"odd": Odd, "held": Held, "plain": nn.Sequential}[kind](nn.Flatten(), nn.Linear(64, 10))
"""


def begun(*argv: str) -> subprocess.Popen[str]:
    """`opnorm sweep` as a process, in a session of its own, so that what it leaves can be told from all else."""
    command = [sys.executable, "-m", "opnorm", "sweep", *argv]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def left_of(session: int) -> list[str]:
    """The processes of a session that are still there, Linux alone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, fields = re.fullmatch(r"\d+ \((.*)\) (.*)\n", path.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
            state, _, _, number, *_ = fields.split()
            found += [name] if int(number) == session and state != "Z" else []
    return found


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def listening(session: int) -> set[str]:
    """The addresses that the processes of a session listen on, as hexadecimal numbers, Linux alone."""
    sockets = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.parent.name)) == session:
                sockets |= {os.readlink(link) for link in (path.parent / "fd").iterdir()}
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    return {f[1].partition(":")[0] for f in fields if f[3] == "0A" and f"socket:[{f[9]}]" in sockets}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, as an address of IPv4 and of IPv6


@pytest.fixture
def ray(place: Path) -> Iterator[None]:
    """What a test on real Ray needs."""
    pytest.importorskip("ray", reason="the extra sweep is not installed")
    if not sys.platform.startswith("linux"):
        pytest.skip("processes are looked up in /proc")
    (place / "zoo.py").write_text(MODELS)
    yield
    assert not [*place.glob("**/*.part")]


@pytest.mark.usefixtures("ray")
class TestRay:
    def test_runs_on_this_machine_alone_and_ends_with_all_its_processes(self, place: Path) -> None:
        settings = "run: {epochs: 1, model: 'zoo.py:make', arg: [kind=held], batch_size: 257}\ngrid: {lr: [0.02]}"
        Path("one.yaml").write_text(settings)
        Path("held").touch()  # so that the run is not over before its processes have been looked at
        process = begun("one.yaml", "--out", "out")
        wait_for(lambda: Path("out/lr0.02/output.log").exists() or process.poll() is not None, "the run")
        addresses = listening(process.pid)
        Path("held").unlink()
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, out
        assert addresses and addresses <= LOOPBACK
        wait_for(lambda: not left_of(process.pid), "its processes to end")
        (found,) = rows_of("out")
        assert (found["status"], found["threads"], found["epochs"]) == ("finished", 1, 1)
        # The run from the JSON alone.
        argv = shlex.split(found["command"])[1:]
        argv[argv.index("--out") + 1] = "again"
        threads = torch.get_num_threads()
        torch.set_num_threads(found["threads"])
        try:
            assert main(argv) == 0
        finally:
            torch.set_num_threads(threads)
        name = "model.safetensors"
        assert Path("again", name).read_bytes() == Path("out/lr0.02", name).read_bytes()

    @pytest.mark.slow
    def test_a_crash_is_one_run_of_many(self, place: Path) -> None:
        Path("odd.yaml").write_text(
            "run: {epochs: 1, model: 'zoo.py:make', batch_size: 257}\n"
            "grid: {arg: [[kind=odd], [kind=plain]], lr: [0.02, 1.0e+38]}"
        )
        process = begun("odd.yaml", "--out", "out")
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, out
        assert "failed and goes on: its process died after: Fatal Python error: Aborted" in out
        assert [r["status"] for r in rows_of("out")].count("finished") >= 2
        process = begun("odd.yaml", "--out", "other", "--cpus-per-run", "99")
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 2 and "expected --cpus-per-run of at most " in out

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_sweep_that_is_stopped_goes_on_to_the_same_weights(self, place: Path, number: int) -> None:
        grid = ("grid.yaml", "--set", "checkpoint_every=0", "--set", "epochs=60", "--set", "K=[1]")
        process = begun(*grid, "--out", "parts")
        checkpoints = [Path("parts", name, "checkpoint.pt") for name in ("K1-lr0.02", "K1-lr0.002")]
        wait_for(lambda: any(path.exists() for path in checkpoints), "a checkpoint")
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), out
        assert not [*Path("parts").glob("*/result.json")], "the runs ended before they were stopped"
        wait_for(lambda: not left_of(process.pid), "its processes to end")
        for out_folder in ("parts", "whole"):
            process = begun(*grid, "--out", out_folder)
            out, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, out
        assert any("going on after step" in log.read_text() for log in Path("parts").glob("*/output.log"))
        for path in checkpoints:
            whole = Path("whole", path.parent.name, "model.safetensors")
            assert path.with_name("model.safetensors").read_bytes() == whole.read_bytes()
