"""What every test may use: `device`, `data_dir`, seeds, and the `slow` marker."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker: before torch is imported, and for its subprocesses too
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("laws")  # a law that fails shows its values, as a test does

ROOT = Path(__file__).parents[1]

# derandomized: a run of the suite is repeatable; `--hypothesis-profile=search` looks further
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="the device that tests compute on: cpu (default), cuda, cuda:1, ..."
    )
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if config.getoption("--device").startswith("cuda") and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU; leave the option out to test on the CPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is slow unless it was asked for, by --runslow, by -m, or by its full name."""
    if config.getoption("--runslow") or "slow" in config.getoption("-m"):
        return
    asked = [argument.rpartition("/")[2] for argument in config.args if "::" in argument]
    kept, left = [], []
    for item in items:
        named = any(item.nodeid.rpartition("/")[2].startswith(name) for name in asked)
        (left if "slow" in item.keywords and not named else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers in every test, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """A test that changes torch's default dtype cannot change the next test."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of `--device`."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def float64(default_dtype: None) -> None:
    """Make float64 the default dtype for one test: `@pytest.mark.usefixtures("float64")`."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of optional data, `OPNORM_DATA` or `../shared/data` beside the repository; a test skips without it."""
    path = Path(os.environ.get("OPNORM_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set OPNORM_DATA to its folder")
    return path
