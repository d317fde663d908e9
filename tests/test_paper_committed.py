"""A committed result of `opnorm reproduce` supports what its figure claims; page and figure are made from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro", reason="the extra lab is not installed")

from opnorm.lab.paper import EXPERIMENTS
from opnorm.lab.paper.figures import FIGURES
from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.page import digest, with_section
from opnorm.lab.paper.sections import CLAIMS, SECTIONS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
COMMITTED = [name for name in EXPERIMENTS if (ROOT / "results" / f"{name}.json").is_file()]


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return content


def test_every_experiment_has_a_figure_a_section_and_claims() -> None:
    assert EXPERIMENTS.keys() == FIGURES.keys() == SECTIONS.keys() == CLAIMS.keys()


def test_the_page_has_no_section_without_a_result() -> None:
    assert {*re.findall(r"<!-- begin (\S+) -->", PAGE.read_text(encoding="utf-8"))} <= {*COMMITTED}


@pytest.mark.parametrize("name", COMMITTED)
def test_the_section_is_what_the_result_gives(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"<!-- begin {name} -->" in page
    assert with_section(page, name, SECTIONS[name](read(name))) == page, f"run opnorm reproduce figures for {name}"
    assert NOISE[name] in page


@pytest.mark.parametrize("name", COMMITTED)
def test_the_figure_was_drawn_from_the_result(name: str) -> None:
    drawn = (ROOT / "docs" / "img" / "results" / f"{name}.svg").read_text(encoding="utf-8")
    assert digest(ROOT / "results" / f"{name}.json") in drawn
    FIGURES[name](read(name))


@pytest.mark.parametrize("name", COMMITTED)
def test_what_a_figure_claims_stands_below_it_and_nothing_else(name: str) -> None:
    claims, section = CLAIMS[name](read(name)), SECTIONS[name](read(name))
    assert any(claims.values())
    bold = "".join(re.findall(r"\*\*(.*?)\*\*", section, re.DOTALL))
    for claim, holds in claims.items():
        assert (claim in bold) == holds


@pytest.mark.parametrize("name", sorted({"tightness", "pretrained"} & {*COMMITTED}))
def test_what_can_be_computed_anywhere_holds(name: str) -> None:
    assert all(CLAIMS[name](read(name)).values())


@pytest.mark.skipif("pretrained" not in COMMITTED, reason="not measured yet")
def test_averages_are_those_of_the_paper_and_ours_are_far_below() -> None:
    from opnorm.lab.paper.pretrained_page import averages, groups

    plain, strided = groups(read("pretrained")).values()
    assert (len(plain), len(strided)) == (13, 4)
    found = {name: [averages(cells, name) for cells in (plain, strided)] for name in ("Runkel2021", "FourierBound")}
    paper, ours = ([average["mean"] for average in found[name] if average] for name in found)
    assert paper == pytest.approx([0.0280, 0.756], rel=0.03)
    assert ours[0] < 0.005 and ours[1] < 0.001
