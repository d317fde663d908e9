"""The page of a run: made of its JSON files alone, self-contained, without errors in a real browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the extra lab is not installed")

import chromium
from opnorm.lab.cli import main
from opnorm.lab.train_page import LARGEST, MOST, run_page

TINY = ("train", "--arg", "width=5", "--batch-size", "257", "--epochs", "3", "--device", "cpu")
RUNS = {
    "soft": ("--scaling", "soft", "--K", "4", "--s-init", "1", "--radii", "0", "0.0005", "0.001"),
    "joint": ("--K-per", "joint", "--epochs", "1"),
    "plain": ("--no-normalize", "--epochs", "1", "--logit-scale", "1"),
    "diverged": ("--no-normalize", "--optimizer", "sgd", "--lr", "1e30", "--schedule", "constant"),
    "chance": ("--lr", "1e-30", "--schedule", "constant", "--patience", "2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a few small runs, of which two diverge."""
    root = tmp_path_factory.mktemp("runs")
    for name, settings in RUNS.items():
        code = main([*TINY, *settings, "--out", str(root / name)])
        assert code == (3 if name in ("diverged", "chance") else 0)
    return {name: root / name for name in RUNS}


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def facts(folder: Path, name: str = "result") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def page_of(folder: Path) -> str:
    """The page that follows from the files."""
    certificate = facts(folder, "certificate") if (folder / "certificate.json").is_file() else None
    return run_page(facts(folder), certificate)


class TestText:
    @pytest.mark.parametrize("name", RUNS)
    def test_the_page_follows_from_the_json_files(self, runs: dict[str, Path], name: str) -> None:
        assert page_of(runs[name]) == (runs[name] / "page.html").read_text()

    def test_the_page_holds_what_the_run_found(self, runs: dict[str, Path]) -> None:
        data, result = data_of(page_of(runs["soft"])), facts(runs["soft"])
        for key in ("test_accuracy", "certified_accuracy", "bound", "confusion", "parameters"):
            assert data["result"][key] == result[key]
        assert [r["test_loss"] for r in data["result"]["history"]] == [r["test_loss"] for r in result["history"]]
        assert data["certificate"] == facts(runs["soft"], "certificate")
        assert data["shown"]["commands"] == [result["environment"]["command"]]
        assert data["shown"]["settings"]["s-init"] == "1"
        rows = {row["name"]: row for row in data["shown"]["layers"]}
        assert {name: row["norm"] for name, row in rows.items()} == result["norms"]
        assert {name: row["factor"] for name, row in rows.items()} == result["scales"]
        assert [rows[name]["limit"] for name in ("0.depthwise", "0.pointwise", "5")] == [2.0, 2.0, 4.0]

    def test_the_page_names_the_commits_that_went_on(self, runs: dict[str, Path]) -> None:
        begun = facts(runs["soft"])["environment"] | {"opnorm": "1", "commit": "a" * 40}
        again, other = begun | {"seed": 1}, begun | {"commit": "b" * 40 + "+changes"}
        text = f"This command repeats it, with opnorm 1, commit {'a' * 12}."
        later = f" What was resumed was computed with opnorm 1, commit {'b' * 12} with changes."
        for resumed, expected in (([again], text), ([other, again, other], text + later)):
            result = facts(runs["soft"]) | {"environment": begun, "resumed": resumed}
            assert data_of(run_page(result, None))["shown"]["repeat"] == expected

    def test_a_pair_that_is_bounded_as_one_has_the_K_of_both(self, runs: dict[str, Path]) -> None:
        rows = {row["name"]: row for row in data_of(page_of(runs["joint"]))["shown"]["layers"]}
        assert rows["2.depthwise → 2.pointwise"]["limit"] == pytest.approx(1.0)
        assert rows["2.depthwise → 2.pointwise"]["norm"] < 1.011
        assert (rows["2.pointwise"]["limit"], rows["2.depthwise"]["limit"]) == (None, 1.0)
        assert rows["0.pointwise"]["limit"] == 1.0  # no pair of this kind: its depthwise layer has 16 kernels a channel

    def test_the_curve_of_certified_accuracy_ends_at_the_largest_radius(self, runs: dict[str, Path]) -> None:
        result = facts(runs["soft"])
        curve = result["certified_curve"]
        assert len(curve) == 101
        assert curve[0] == [0.0, result["test_accuracy"]]
        assert curve[-1][1] == 0.0 < curve[-2][1]
        assert [part for _, part in curve] == sorted((part for _, part in curve), reverse=True)
        before, after = min(p for r, p in curve if r <= 0.0005), max(p for r, p in curve if r >= 0.0005)
        assert before >= result["certified_accuracy"]["0.0005"] >= after

    def test_a_run_without_a_result_says_why(self, runs: dict[str, Path]) -> None:
        for name, words in (("diverged", "the loss is|weights are"), ("chance", "that of chance")):
            page = page_of(runs[name])
            assert re.search(words, data_of(page)["result"]["reason"])
            assert re.search("<title>.*diverged</title>", page)
            assert data_of(page)["certificate"] is None

    def test_it_refers_to_nothing_else(self, runs: dict[str, Path]) -> None:
        links: list[str] = []

        class Links(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                links.extend(v for k, v in attrs if k in ("src", "href", "srcset", "action") and v)

        for folder in runs.values():
            page = page_of(folder)
            Links().feed(page)
            assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)|<iframe", page)
            assert "{{" not in page
        assert {*links} == {"data:,", "#certificate"}

    def test_no_name_can_break_out_of_the_page(self, runs: dict[str, Path]) -> None:
        bad = "</script><script>alert(1)</script>"
        result = facts(runs["soft"])
        result |= {"model": bad, "config": result["config"] | {"model": bad}}
        result["data"]["classes"][3] = bad
        page = run_page(result, None)
        assert page.count("<script") == 2 and "alert(1)</script>" not in page
        assert data_of(page)["shown"]["classes"][3] == bad

    def test_many_classes_become_the_pairs_that_are_confused_most(self, runs: dict[str, Path]) -> None:
        result = facts(runs["soft"])
        n = LARGEST + 1
        confusion = torch.diag(torch.arange(n))
        confusion[3, 5], confusion[7, 2] = 8, 9
        confusion[torch.arange(20), torch.arange(20) + 10] = 1
        result["data"]["classes"] = [f"class {i}" for i in range(n)]
        shown = data_of(run_page(result | {"confusion": confusion.tolist()}, None))["shown"]
        assert shown["classes"] == []
        assert shown["confused"][:2] == [["class 7", "class 2", 9], ["class 3", "class 5", 8]]
        assert len(shown["confused"]) == MOST


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if chromium.find() is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    found = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


class TestBrowser:
    @pytest.mark.parametrize("width", [390, 1280])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_page_of_a_run(self, browser: Any, runs: dict[str, Path], width: int, scheme: str) -> None:
        opened(browser, runs["soft"] / "page.html", width, scheme)
        result = facts(runs["soft"])

        def count(selector: str) -> int:
            return int(browser.evaluate(f"document.querySelectorAll('{selector}').length"))

        assert count("#charts svg") == 3 and count("#certified svg") == 1
        assert count("#certified .dot") == 2  # radius 0 is the accuracy
        assert count("#norms-body tr") == len(result["norms"]) == 5
        assert count("#confusion tr") == 11
        assert count("#waterfall .row") > 3 and count("#body tr") > 3
        text = browser.evaluate("document.querySelector('main').innerText")
        for part in (f"{100 * result['test_accuracy']:.2f} %", "certified at radius 0.001", "--s-init 1", "K·tanh(s)"):
            assert part in text
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
        sizes = "[...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert min(browser.evaluate(sizes)) > 10.5

    @pytest.mark.parametrize("name", ["joint", "plain", "diverged", "chance"])
    def test_pages_that_lack_something(self, browser: Any, runs: dict[str, Path], name: str) -> None:
        opened(browser, runs[name] / "page.html", 390, "light")
        hidden = {
            part: browser.evaluate(f"document.getElementById('{part}').hidden")
            for part in ("reason", "curves", "robustness", "norms", "mistakes", "to-certificate")
        }
        left = name in ("joint", "plain")
        assert hidden == {
            "reason": left, "curves": name == "diverged", "robustness": not left, "norms": name != "joint",
            "mistakes": not left, "to-certificate": not left,
        }  # fmt: skip

    def test_a_pointer_reads_a_curve(self, browser: Any, runs: dict[str, Path]) -> None:
        opened(browser, runs["soft"] / "page.html", 1280, "light")
        reading = "document.querySelector('#charts .reading').textContent"
        assert browser.evaluate(reading).startswith("epoch 3: training ")
        browser.evaluate(
            "s = document.querySelector('#charts svg'), b = s.getBoundingClientRect(),"
            "s.dispatchEvent(new PointerEvent('pointermove', { clientX: b.left + 50, clientY: b.top + 50 })), 0"
        )
        assert browser.evaluate(reading).startswith("epoch 1: training ")

    def test_curves_of_one_epoch_and_of_numbers_that_are_none(
        self, browser: Any, runs: dict[str, Path], tmp_path: Path
    ) -> None:
        result = facts(runs["soft"])
        flat = result["history"][0] | {"epoch": 2, "test_loss": "nan", "train_loss": "inf", "bound": 0.0}
        for history in (result["history"][:1], [flat], result["history"][:1] * 2, [*result["history"], flat]):
            page = tmp_path / "page.html"
            page.write_text(run_page(result | {"history": history}, None))
            opened(browser, page, 1280, "dark")


def opened(browser: Any, page: Path, width: int, scheme: str) -> None:
    """Open a page, on which nothing may fail, nothing may be fetched and nothing may be wider than the screen."""
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page, width, scheme=scheme)
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
