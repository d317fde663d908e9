"""`opnorm reproduce cifar-grid` and `imagenet`: which runs they are, what their pages say, and how they end."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")
pytest.importorskip("yaml", reason="the extra sweep is not installed")

from PIL import Image

from opnorm.lab import data_cifar, paper
from opnorm.lab.cli import run
from opnorm.lab.data import load_data
from opnorm.lab.paper import cifar_grid, cifar_grid_page, imagenet, imagenet_page
from opnorm.lab.paper.cifar_grid import CifarGrid
from opnorm.lab.paper.imagenet import ImageNet, among_the_first
from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.page import digest, svg
from opnorm.lab.paper.runs import milestones
from sweep_stage import Theatre

# Table 1 of the paper, K from 1 to 10, at each learning rate with hard and with soft scaling.
TABLE = """
15.38 14.98 16.64 15.56 16.34 16.28 10.00 10.00 10.00 10.00
17.23 17.05 19.93 19.00 45.01 42.17 54.70 55.65 10.00 10.00
18.02 17.48 45.88 42.08 67.37 72.51 74.73 72.33 10.00 10.00
35.45 35.34 62.90 62.73 81.07 80.94 84.71 85.65 10.00 10.00
50.68 50.36 74.85 74.73 86.68 86.72 90.53 90.74 10.00 10.00
59.73 59.65 80.45 80.19 88.60 87.63 10.00 10.00 10.00 10.00
62.10 62.39 81.10 81.06 85.24 85.36 10.00 10.00 10.00 10.00
61.53 62.74 81.21 81.17 80.16 10.00 10.00 10.00 10.00 10.00
45.52 52.25 32.69 41.92 10.00 10.00 10.00 10.00 10.00 10.00
10.00 10.00 10.00 10.00 10.00 10.00 10.00 10.00 10.00 10.00
"""
RATES = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
ENVIRONMENT = {
    "command": "opnorm reproduce cifar-grid --data-path some/where", "gpu": None, "processor": "abacus", "cores": 2,
    "torch": "2.13.0+cpu",
}  # fmt: skip


def cell_of(K: float, lr: float, scaling: str, accuracy: float | None) -> dict[str, Any]:
    status = "diverged" if accuracy is None else "finished"
    cell = {"K": K, "lr": lr, "scaling": scaling}
    return {"cell": cell, "status": status, "reason": None, "test_accuracy": accuracy, "seconds": 36.0}


@pytest.fixture
def published() -> dict[str, Any]:
    """The result that would be the paper's."""
    cells = {}
    for K, line in enumerate(TABLE.strip().splitlines(), 1):
        for (lr, scaling), text in zip(itertools.product(RATES, ("hard", "soft")), line.split(), strict=True):
            cells[f"K = {K}, lr = {lr}, scaling = {scaling}"] = cell_of(float(K), lr, scaling, float(text) / 100)
    settings = {"K": [float(K) for K in range(1, 11)], "lr": RATES, "epochs": 300, "width": 64}
    data = {"training": 50_000, "test": 10_000, "classes": 10}
    about = {"environment": ENVIRONMENT, "profile": "paper", "changes": [], "settings": settings, "data": data}
    return about | {"cells": cells}


def change(result: dict[str, Any], accuracy: float | None, **cell: Any) -> dict[str, Any]:
    """The same with another accuracy of some runs."""
    changed = copy.deepcopy(result)
    for row in changed["cells"].values():
        if all(row["cell"][name] == value for name, value in cell.items()):
            row["test_accuracy"], row["status"] = accuracy, "diverged" if accuracy is None else "finished"
    return changed


def holds(result: dict[str, Any]) -> list[bool]:
    return [*cifar_grid_page.claims(result).values()]


class TestClaimsOfTheGrid:
    def test_the_published_table_has_its_three_findings(self, published: dict[str, Any]) -> None:
        assert holds(published) == [True, True, True]
        best = cifar_grid_page.best_of(published)
        for K, (accuracy, lr, scaling) in cifar_grid_page.PUBLISHED.items():
            assert best[K].accuracy == pytest.approx(accuracy / 100)
            assert not scaling or (best[K].lr, best[K].scaling) == (lr, scaling)
        assert [K for K, found in best.items() if not found.learned] == [10]

    @pytest.mark.parametrize(
        ("accuracy", "cell", "expected"),
        [
            (0.95, {"K": 8.0, "lr": 1e-2}, [False, False, True]),  # a rate that rises again, and an accuracy
            (0.30, {"K": 8.0, "lr": 1e-3}, [True, True, True]),
            (0.70, {"K": 4.0}, [False, False, False]),  # a dip, at no rate in particular
            (0.89, {"K": 4.0, "lr": 1e-1}, [False, True, False]),  # nothing above it that could collapse
            (0.10, {"lr": 1e-1, "scaling": "soft"}, [True, True, True]),
            (0.12, {"lr": 1e-1, "scaling": "soft"}, [True, True, False]),  # worse than nothing, but no collapse
            (None, {"lr": 1e-1}, [True, True, True]),
            (0.60, {"K": 10.0, "lr": 1e-5}, [True, False, True]),  # it does not fall to the end
            (0.815, {"K": 8.0, "lr": 1e-5}, [True, True, True]),
        ],
    )
    def test_each_can_fail(
        self, published: dict[str, Any], accuracy: float | None, cell: dict[str, Any], expected: list[bool]
    ) -> None:
        assert holds(change(published, accuracy, **cell)) == expected

    def test_nothing_that_learns_is_no_finding(self, published: dict[str, Any]) -> None:
        assert holds(change(published, 0.1)) == [False, False, False]
        assert holds(change(published, None)) == [False, False, False]

    @pytest.mark.parametrize(
        ("values", "answer"),
        [
            ([0.1, 0.5, 0.2], True), ([0.1, 0.5, 0.495, 0.5, 0.2], True), ([0.1, 0.3, 0.28, 0.5, 0.2], False),
            ([0.1, 0.2, 0.3], False), ([0.3, 0.2, 0.1], False), ([0.5], False), ([0.5, 0.505, 0.5], False),
        ],
    )  # fmt: skip
    def test_rises_then_falls(self, values: list[float], answer: bool) -> None:
        assert cifar_grid_page.rises_then_falls(values) is answer

    def test_the_section_says_what_holds(self, published: dict[str, Any]) -> None:
        text = cifar_grid_page.section(published)
        assert "The network and the epochs are those of the paper." in text and "does not hold here" not in text
        assert "| 5 | 50.68 / 50.36 | 74.85 / 74.73 | 86.68 / 86.72 | 90.53 / **90.74** | 10.00 / 10.00 |" in text
        assert NOISE["cifar-grid"] in text
        assert "| 10 | 10.00 / 10.00 | 10.00" in text and "1.0 hours of training" in text
        assert "`opnorm reproduce cifar-grid --data-path where`" in text
        small = change(published, 0.12, lr=1e-1) | {"settings": published["settings"] | {"width": 8, "epochs": 5}}
        text = cifar_grid_page.section(change(small, None, K=7.0))
        assert "What does not hold here: " in text and "The network has 8 channels" in text
        assert "| 7 | × / × |" in text and "× a run that diverged" in text

    def test_the_figure_shows_the_table(self, published: dict[str, Any]) -> None:
        figure = cifar_grid_page.figure(change(published, None, K=7.0, lr=1e-1))
        hard, soft, beside, _ = figure.axes
        assert [hard.get_title(), soft.get_title()] == ["scaling hard", "scaling soft"]
        assert [text.get_text() for text in hard.texts][20:25] == ["50.68", "74.85", "86.68", "90.53", "10.00"]
        assert [text.get_text() for text in soft.texts][30:35] == ["62.39", "81.06", "85.36", "10.00", "×"]
        lines = {line.get_label(): line for line in beside.get_lines()}
        assert lines["here"].get_xydata()[4].tolist() == pytest.approx([5, 90.74])
        assert [text.get_text() for text in beside.texts][:3] == ["0.0001", "0.01", "0.01"]
        assert len(beside.texts) == 9  # not of what has learned nothing
        assert svg("cifar-grid", published, "x") == svg("cifar-grid", published, "x")


class TestGrid:
    def test_the_paper_profile_is_appendix_b(self) -> None:
        runs = cifar_grid.grid(CifarGrid(profile="paper", **cifar_grid.PROFILES["paper"]))
        assert len({run.name for run in runs}) == len(runs) == 100
        config = runs[0].config
        assert (config.epochs, config.milestones, config.arg) == (300, (150, 250), ("width=64",))
        assert (config.optimizer, config.momentum, config.batch_size, config.eps) == ("sgd", 0.9, 128, 0.01)
        assert {run.config.lr for run in runs} == {*RATES} and {run.config.s_init for run in runs} == {3.0}

    def test_figure_three_has_its_rates(self) -> None:
        runs = imagenet.grid(ImageNet(profile="paper", **imagenet.PROFILES["paper"]), Path("images"))
        found = [(run.config.K, run.config.lr, run.config.s_init) for run in runs]
        assert found == [
            (10, 1e-3, 3), (12, 1e-3, 3), (15, 1e-3, 3), (20, 5e-4, 3), (30, 5e-4, 0.5), (40, 3e-4, 0.5)
        ]  # fmt: skip
        config = runs[0].config
        assert (config.model, config.scaling, config.epochs, config.milestones) == (
            "mobilenet_v2", "soft", 150, (50, 100)
        )  # fmt: skip
        assert (config.batch_size, config.image_size, config.arg) == (128, 224, ())

    @pytest.mark.parametrize(
        ("epochs", "expected"),
        [(300, [150, 250]), (12, [6, 10]), (6, [3, 5]), (2, [1]), (1, None)],
    )
    def test_milestones_lie_inside_a_run(self, epochs: int, expected: list[int] | None) -> None:
        found = milestones(epochs, (1 / 2, 5 / 6))
        assert found == ({"schedule": "constant"} if expected is None else {"milestones": expected})

    def test_among_the_first(self) -> None:
        logits = torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0], [0, 3, 2, 1]])
        labels = torch.tensor([3, 3, 2])
        assert [among_the_first(logits, labels, n) for n in (1, 2, 9)] == pytest.approx([1 / 3, 2 / 3, 1])

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["cifar-grid", "--width", "0"], "expected --width of at least 1, got 0"),
            (["cifar-grid", "--epochs", "0"], "expected --epochs of at least 1"),
            (["cifar-grid", "--K", "1", "1"], "expected different values under grid: K"),
            (["cifar-grid", "--data-path", "."], "expected data_batch_1.bin"),
            (["cifar-grid", "--cpus-per-run", "0"], "expected --cpus-per-run of at least 1"),
            (["cifar-grid", "--gpus-per-run", "1.5"], "expected --gpus-per-run from 0 to 1"),
            (["imagenet", "--profile", "paper"], "expected --images with a folder of images in the profile paper"),
            (["imagenet", "--made", "3"], "expected --made of at least 20, got 3"),
            (["imagenet", "--K", "11"], "expected --K among those with a published learning rate, 10, 12, 15"),
            (["imagenet", "--images", "nowhere"], "expected --images as a folder with train and val, got nowhere"),
        ],
    )
    def test_wrong_values_are_one_line(
        self, argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        assert run("opnorm reproduce", lambda: paper.main(argv)) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def imagenet_result(accuracies: list[float | None]) -> dict[str, Any]:
    cells = {
        f"K = {K}": cell_of(float(K), 1e-3, "soft", accuracy)
        | {"lr": 1e-3, "s_init": 3.0, "top5_accuracy": None if accuracy is None else min(1.0, 2 * accuracy)}
        for K, accuracy in zip((10, 12, 15), accuracies, strict=True)
    }
    settings = {"epochs": 3, "batch_size": 16}
    data = {"training": 1000, "test": 500, "classes": 10, "shape": [3, 32, 32]}
    about = {"environment": ENVIRONMENT, "profile": "small", "changes": [], "settings": settings, "data": data}
    return about | {"cells": cells}


class TestFigureThree:
    @pytest.mark.parametrize(
        ("accuracies", "holds"),
        [
            ([0.3, 0.4, 0.45], [True, True]), ([0.3, 0.4, 0.4], [True, False]), ([0.4, 0.3, 0.5], [True, False]),
            ([0.3, 0.4, None], [False, False]), ([0.1, 0.2, 0.3], [True, False]), ([None] * 3, [False, False]),
        ],
    )  # fmt: skip
    def test_claims_can_fail(self, accuracies: list[float | None], holds: list[bool]) -> None:
        assert [*imagenet_page.claims(imagenet_result(accuracies)).values()] == holds

    def test_section_and_figure_show_the_runs(self) -> None:
        result = imagenet_result([0.3, 0.4, None])
        text = imagenet_page.section(result)
        assert "| 12 | 0.001 | 3 | 40.00 % | 80.00 % | finished |" in text
        assert "| 15 | 0.001 | 3 |  |  | diverged: None |" in text
        assert "This profile proves that the pipeline works" in text and NOISE["imagenet"] in text
        assert "This profile proves" not in imagenet_page.section(result | {"profile": "paper"})
        (axes,) = imagenet_page.figure(result).axes
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert lines["top 5"].get_xydata()[:2].tolist() == [[10, 60], [12, 80]]
        assert lines["top 5 by chance"].get_ydata()[0] == 50
        assert [text.get_text() for text in axes.texts] == ["diverged"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the start of a page, and with a CIFAR-10 of 40 images in the folder `data`, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_cifar, "RECORDS", 40)
    monkeypatch.setattr(data_cifar, "SUMS", {})
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(("data_batch_1.bin", "test_batch.bin")):
        random = numpy.random.default_rng(seed)
        records = [bytes([i % 10]) + random.bytes(3072) for i in range(40)]
        (tmp_path / "data" / name).write_bytes(b"".join(records))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text("# Results\n")
    return tmp_path


GRID = ("cifar-grid", "--data-path", "data", "--epochs", "1", "--width", "2", "--K", "3", "--lr", "0.01")


class TestToTheEnd:
    def test_from_the_command_to_the_page(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Theatre().enter(monkeypatch)
        assert paper.main(GRID) == 0
        path = Path("results/cifar-grid.json")
        result = json.loads(path.read_text())
        assert [*result["cells"]] == ["K = 3, lr = 0.01, scaling = hard", "K = 3, lr = 0.01, scaling = soft"]
        for cell in result["cells"].values():
            assert cell["status"] == "finished" and 0 <= cell["test_accuracy"] <= 1 and cell["epochs"] == 1
            assert cell["command"].startswith("opnorm train --preset paper-cifar10 --arg width=2 --epochs 1")
            assert cell["K_per"] == "pair"
        assert result["data"] | {"notes": []} == {
            "name": "cifar10", "training": 40, "test": 40, "shape": [3, 32, 32], "notes": [], "classes": 10
        }  # fmt: skip
        assert result["changes"] == ["epochs", "width", "K", "lr"] and result["settings"]["data_path"] == "data"
        assert [*Path("results").iterdir()] == [path]
        page, figure = Path("docs/results.md"), Path("docs/img/results/cifar-grid.svg")
        assert "## Norm and learning rate on CIFAR-10: table 1" in page.read_text()
        assert digest(path).encode() in figure.read_bytes()
        # Again: what has ended is kept; on other data it is refused; with --restart it is forgotten.
        assert paper.main(GRID) == 0 and len(stage.tasks) == 2
        monkeypatch.setattr(data_cifar, "RECORDS", 20)
        for file in Path("data").iterdir():
            file.write_bytes(file.read_bytes()[: 20 * 3073])
        assert run("opnorm reproduce", lambda: paper.main(GRID)) == 2 and len(stage.tasks) == 2
        assert json.loads(path.read_text())["data"]["training"] == 40
        monkeypatch.setattr(Theatre, "get", lambda self, task: 2)
        assert paper.main([*GRID, "--restart"]) == 1 and len(stage.tasks) == 4
        assert json.loads(path.read_text())["cells"] == result["cells"]  # until there are others

    def test_a_machine_without_ray_is_told_before_anything_begins(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
        monkeypatch.setattr("opnorm.lab.paper.runs.find_spec", lambda name: None)
        assert run("opnorm reproduce", lambda: paper.main(GRID)) == 2
        assert 'pip install "opnorm[sweep]"' in capsys.readouterr().err and not Path("runs").exists()

    def test_a_run_that_fails_leaves_no_result(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Theatre().enter(monkeypatch)
        monkeypatch.setattr(Theatre, "get", lambda self, task: 1)
        assert paper.main(GRID) == 1 and len(stage.tasks) == 4
        assert not Path("results").exists()

    def test_images_are_made_once_and_are_those_of_cifar(self, place: Path) -> None:
        options = ImageNet(data_path=Path("data"), made=30)
        folder = imagenet.folder_of(options)
        made = load_data("imagenet", folder, image_size=32, show=lambda _: None)
        assert (len(made.train.labels), len(made.test.labels), len(made.classes)) == (30, 15, 10)
        source = load_data("cifar10", Path("data"), show=lambda _: None)
        pixels = numpy.array(Image.open(folder / "train" / source.classes[7] / "00007.png"))
        assert (torch.from_numpy(pixels).permute(2, 0, 1) == source.train.images[7]).all()  # type: ignore[attr-defined]
        Path("data").rename("gone")
        assert imagenet.folder_of(options) == folder
        assert not [*folder.parent.glob("*.part")]

    @pytest.mark.slow
    def test_imagenet_on_ray_to_the_page(self, place: Path) -> None:
        """With files that are there already, and in processes, as a person runs it."""
        pytest.importorskip("ray", reason="the extra sweep is not installed")
        random = numpy.random.default_rng(0)
        for part, label, n in itertools.product(("train", "val"), ("cat", "dog"), range(8)):
            file = Path("photos", part, label, f"{n}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=numpy.uint8)).save(file)
        code = "import sys; from opnorm.lab import paper; sys.exit(paper.main(sys.argv[1:]))"
        words = ["imagenet", "--images", "photos", "--epochs", "1", "--K", "10", "40"]
        variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        cells = json.loads(Path("results/imagenet.json").read_text())["cells"]
        assert [*cells] == ["K = 10", "K = 40"]
        for cell in cells.values():
            if cell["status"] == "finished":
                assert cell["test_accuracy"] <= cell["top5_accuracy"] == 1.0  # of two classes
        assert (cells["K = 40"]["lr"], cells["K = 40"]["s_init"]) == (3e-4, 0.5)
        assert "## MobileNetV2 by K: figure 3" in Path("docs/results.md").read_text()
