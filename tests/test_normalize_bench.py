"""`opnorm bench step`, and the memory of a Normalizer: what it keeps, and what a step needs beside it."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm import Normalizer, operator_norm, operators_of
from opnorm.lab.bench import step
from opnorm.lab.bench.memory import growth
from opnorm.models import build


def storages() -> dict[int, int]:
    """The bytes of every tensor that is alive, by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_what_is_kept_for_mobilenet_is_below_200_kB() -> None:
    """State, and the tables of waves that all steps share, too."""
    model = build("mobilenet_v2")
    before = storages()
    norm = Normalizer(model, (3, 224, 224), K=3.0)
    norm.step()
    after = storages()
    state = sum(b.numel() * b.element_size() for b in model.buffers())
    assert 4 * 10_000 < state < 60_000  # a number for each input of the 35 matrices, and little more
    assert state <= sum(size for address, size in after.items() if address not in before) < 200_000


def test_peak_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not need as much as the weights, which are 9 MiB."""
    for name, value in step.MALLOC.items():  # as `opnorm bench step` has set them for itself
        monkeypatch.setenv(name, value)
    peak = step._peak_in_process(step.NETWORKS["ds_resnet34"])
    assert 2**18 < peak < 64 * 2**20


def test_peak_memory_sees_what_a_step_allocates(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    plain = Normalizer.step

    def wasteful(self: Normalizer) -> None:
        torch.ones(2**25, dtype=torch.uint8)
        plain(self)

    monkeypatch.setattr(Normalizer, "step", wasteful)
    step.report("ds_resnet34")
    assert int(capsys.readouterr().out) >= 0.9 * 2**25


@pytest.mark.slow
def test_peak_memory_of_mobilenet_is_below_64_MiB() -> None:
    assert 2**18 < step._peak_in_process(step.NETWORKS["mobilenet_v2"]) < 64 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_growth_is_that_of_the_peak_and_not_of_what_is_left() -> None:
    assert growth(lambda: torch.ones(2**24, dtype=torch.uint8)) >= 0.9 * 2**24


def test_the_summary_says_what_is_kept_and_needed(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    seconds = {"median": 0.5, "low": 0.4, "high": 0.6}
    cell = {"seconds": seconds, "ratio": {"median": 1.0, "low": 1.0, "high": 1.0}}
    alone = {"seconds": seconds, "state_bytes": 40_500}
    results = {"network": step.NETWORKS["ds_resnet34"], "step": {step.BARE: cell}, "not_run": {}}
    step._show(results | {"normaliser": alone | {"peak_bytes": 3 * 2**20}})
    assert "it keeps 40.5 kB, and needs 3.0 MiB at its peak\n" in capsys.readouterr().out
    step._show(results | {"normaliser": alone})
    assert "it keeps 40.5 kB\n" in capsys.readouterr().out


def stepped(way: str) -> torch.nn.Module:
    """A small network after a step in one of the ways."""
    for package, name in (("orthogonium", "orthogonium AOL"), ("deel.torchlip", "deel-torchlip")):
        if way == name:
            pytest.importorskip(package, reason="the extra bench is not installed")
    network = step.Network("ds_convnet", (1, 8, 8), 5, K=2.0)
    model, optimizer, after = step.WAYS[way](build(network.name), network)
    step._step(model, optimizer, after, torch.randn(5, 1, 8, 8), torch.arange(5))
    return model


@pytest.mark.filterwarnings("ignore")  # of what the packages themselves import and call
@pytest.mark.parametrize("way", [way for way in step.WAYS if "CUDA" not in way])
def test_every_way_takes_a_step(way: str) -> None:
    assert all(p.isfinite().all() for p in stepped(way).parameters())


@pytest.mark.parametrize("way", ["Prach2022", "Delattre2024"])
def test_published_bounds_keep_every_layer_below_K(way: str) -> None:
    norms = [float(operator_norm(layer)) for layer in operators_of(stepped(way), (1, 8, 8)).values()]
    assert len(norms) == 5 and all(0.2 < norm < 2 * (1 + 1e-4) for norm in norms)


@pytest.mark.filterwarnings("ignore")
def test_aol_is_done_as_the_layers_of_the_package_do_it() -> None:
    aol = pytest.importorskip("orthogonium.layers.conv.AOL", reason="the extra bench is not installed")
    network = step.Network("", (6, 8, 8), 5, K=1.0)
    for options in ({"groups": 1}, {"groups": 6}, {"groups": 1, "stride": 2}):
        theirs = aol.AOLConv2D(6, 6, 3, padding=1, **options)
        plain = torch.nn.Conv2d(6, 6, 3, padding=1, **options)
        with torch.no_grad():
            plain.weight.copy_(theirs.parametrizations.weight.original)
        (ours, *_), _, _ = step.WAYS["orthogonium AOL"](torch.nn.Sequential(plain), network)
        torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    """In a process of its own, since it starts itself again with other settings of malloc."""
    file = tmp_path / "step.json"
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "opnorm", "bench", "step", "--batch", "2", "--rounds", "2", "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "150"}
    done = subprocess.run(
        [*command, "--only", "Normalizer"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["batch"] == 2
    assert list(results["step"]) == ["no normalisation", "Normalizer"]
    alone = results["normaliser"]
    assert 0 < alone["state_bytes"] < 200_000
    assert 2**18 < alone["peak_bytes"] < 64 * 2**20
    printed = re.sub(r"\s+", " ", done.stdout)
    assert f"keeps {alone['state_bytes'] / 1e3:.1f} kB, and needs {alone['peak_bytes'] / 2**20:.1f} MiB" in printed
