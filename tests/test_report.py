"""The page of a certificate: self-contained, without errors in a real browser, readable on a phone and on a desk."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import chromium
import network_cases as nets
import opnorm

WIDTHS = (390, 1400)


@pytest.fixture(scope="module")
def certificate() -> opnorm.Certificate:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 1))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nets.Join("residual", nn.Identity(), block),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 5, padding=2, groups=8),
        nn.Conv2d(8, 12, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )
    return opnorm.certify(model, (3, 24, 24), inputs=1, ascent=3)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_the_certificate_and_refers_to_nothing_else(certificate):
    page = certificate.to_html()
    assert data_of(page) == json.loads(certificate.to_json())
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag, attributes):
            links.extend(v for k, v in attributes if k in ("src", "href", "srcset", "action") and v)

    Links().feed(page)
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", page)
    assert "{{" not in page


def test_no_name_can_break_out_of_the_page(certificate):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict(
                {"</script><script>alert(1)</script>": nn.Linear(3, 2), "<b>&": nn.Linear(2, 2)}
            )

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x).relu()
            return x

    Model.__name__ = "<i>Model</i>"
    page = opnorm.certify(Model(), (3,), lower=False).to_html()
    assert page.count("<script") == 2 and "alert(1)</script>" not in page and "<i>Model" not in page
    assert "</script><script>alert(1)</script>" in data_of(page)["layers"][0]["name"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium.find() is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    found = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(certificate, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "certificate.html"
    path.write_text(certificate.to_html(), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(browser, page, certificate, width, scheme, tmp_path):
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page, width, scheme=scheme)
    browser.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('#body tr').length") == len(certificate.layers)
    assert browser.evaluate("document.querySelectorAll('#waterfall .row').length") == len(certificate.layers) + 1
    assert browser.evaluate("document.querySelectorAll('#kernels canvas').length") == len(certificate.responses) > 0
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    sizes = "[...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(browser.evaluate(sizes)) > 10.5


def test_sorting_filtering_and_the_theme(browser, page, certificate):
    browser.open(page, 1400)
    column = "[...document.querySelectorAll('#body tr')].map(r => r.children[0].textContent)"
    names = [row.name for row in certificate.layers]
    assert browser.evaluate(column) == names
    click = "document.querySelector('th[data-key=alone] button').click()"
    browser.evaluate(click)
    falling = [row.name for row in sorted(certificate.layers, key=lambda r: -r.alone)]
    assert browser.evaluate(column) == falling
    assert browser.evaluate("document.querySelector('th[data-key=alone]').getAttribute('aria-sort')") == "descending"
    browser.evaluate(click)
    assert browser.evaluate(column + "[0]") == falling[-1]
    browser.evaluate("f = document.getElementById('filter'); f.value = 'max_pool'; f.dispatchEvent(new Event('input'))")
    assert browser.evaluate("document.querySelectorAll('#body tr').length") == 1
    before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert browser.problems == []


def test_pages_of_extreme_certificates(browser, tmp_path):
    deep = nn.Sequential(*(m for i in range(40) for m in (nn.Linear(3, 3), nn.Tanh())))
    with torch.no_grad():
        for p in deep.parameters():
            p.mul_(40)
    for name, model in {"ones": nn.ReLU(), "deep": deep}.items():
        path = tmp_path / f"{name}.html"
        path.write_text(opnorm.certify(model, (3,), lower=False).to_html(), encoding="utf-8")
        browser.problems.clear()
        browser.open(path, 390)
        assert browser.problems == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
