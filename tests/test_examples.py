"""The examples run, and find what they say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import opnorm

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_train_soft_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert example("train_soft_scaling").main(epochs=4) > 0.6
    assert "2.pointwise" in capsys.readouterr().out


def test_train_with_ema() -> None:
    assert 1.5 < example("train_with_ema").main() <= 2.0


def test_gan_critic() -> None:
    assert 1.2 < example("gan_critic").main() < 2.1


def test_invertible_block() -> None:
    constants, error = example("invertible_block").main(steps=10)
    assert all(0 < constant <= 0.7 * (1 + 1e-6) for constant in constants)
    assert error < 1e-8


@pytest.mark.parametrize("fsdp", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
@pytest.mark.slow
def test_train_on_several(fsdp: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    source = str(EXAMPLES.parent / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(EXAMPLES / "train_on_several.py"), *fsdp],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    norms = [float(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(norms) == 5
    assert all(1.8 < norm <= 2.001 for norm in norms)


def test_certify_your_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example("certify_your_network").main()
    assert "‖f(x) - f(y)‖₂ ≤" in capsys.readouterr().out
    assert (tmp_path / "certificate.html").read_text(encoding="utf-8").startswith("<!")


def test_certify_own_rule(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        example("certify_own_rule").main()
    finally:
        opnorm.rules.forget(torch.ops.aten.sinc.default)
    refused, certified = capsys.readouterr().out.split("certified: ")
    assert "sinc" in refused and "layer_norm" in refused
    assert float(certified) > 0
