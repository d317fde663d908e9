"""The sections of docs/results.md: pure functions from the JSON of a result to Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opnorm.lab.paper import cifar_grid_page, imagenet_page
from opnorm.lab.paper.noise import NOISE
from opnorm.lab.paper.pretrained_page import pretrained, pretrained_claims
from opnorm.lab.paper.prose import caption, command, origin, percent, table
from opnorm.lab.paper.timing_page import timing, timing_claims

Result = dict[str, Any]
PUBLISHED = {7: 0.17, 128: 0.02}  # section 4.1 of the paper: the medians of figure 2 at both of its ends


def tightness_claims(result: Result) -> dict[str, bool]:
    """What figure 2 shows, and whether it does."""
    cells = [*result["cells"].values()]
    return {
        "At every size and for every kind of kernel, the median overestimation of `FourierBound` is below that of the "
        "paper's bound, and that of `auto` is no larger than that of `FourierBound`.": all(
            c["auto"]["median"] <= c["FourierBound"]["median"] < c["paper"]["median"] for c in cells
        ),
        "Of every kernel the norm is enclosed, from below and from above, to 0.01 %, and no bound lies below it.": all(
            c["truth apart"] <= 1e-4 and c[key]["least"] >= 0
            for c in cells
            for key in ("paper", "FourierBound", "auto")
        ),
    }


def tightness(result: Result) -> str:
    """Figure 2, and what explains the difference from the published numbers."""
    cells = [*result["cells"].values()]
    plane = [c for c in cells if c["family"] == "3×3"]
    columns = ("paper to reference", "paper", "FourierBound", "auto")
    plain = table(
        ("N", "the paper's bound to its own reference", "to the norm", "`FourierBound`", "`auto`"),
        [(str(c["N"]), *(percent(c[key]["median"]) for key in columns)) for c in plane],
    )
    others = table(
        ("kernel", "N", "the paper's bound", "`FourierBound`", "`auto`"),
        [
            (c["family"], str(c["N"]), *(percent(c[key]["median"]) for key in columns[1:]))
            for c in cells
            if c["family"] != "3×3"
        ],
    )
    above = max(c["FourierBound to paper"]["above"] for c in cells)
    largest = max(c["FourierBound to paper"]["largest"] for c in cells)
    apart = max(c["truth apart"] for c in cells)
    return f"""
## Gaussian kernels: figure 2

{command(result)}: {result["settings"]["kernels"]:,} depthwise kernels of independent Gaussian entries for each
size, zero padding, stride 1 unless it says otherwise. By how much a bound exceeds the norm. {origin(result)}

![Overestimation by resolution, on logarithmic axes](img/results/tightness.svg)

{caption(tightness_claims(result))} Lines are medians, bands reach from quartile to quartile. What lies on the lower
edge is exact.

{plain}

The norms are found twice: from below by a Lanczos iteration, from above by a Cholesky factorisation that proves them.
The two are at most {percent(apart, 4)} apart. `FourierBound` is the tighter bound in the median, and not for each
single kernel: for up to {percent(above, 1)} of the kernels of a size it lies above the paper's bound, by
{percent(largest)} at most.

{others}

{_published(plane[0], plane[-1])}

{NOISE["tightness"]}
"""


def _published(small: dict[str, Any], large: dict[str, Any]) -> str:
    """Why the paper's medians are other ones."""

    def both(key: str, digits: int = 2) -> str:
        return " and ".join(percent(abs(c[key]["median"]), digits) for c in (small, large))

    known = [c for c in (small, large) if c["N"] in PUBLISHED]
    published = ", ".join(f"{percent(PUBLISHED[c['N']], 0)} at N = {c['N']}" for c in known) or "of other sizes"
    alone, reference = (
        [abs(c[key]["median"] - PUBLISHED[c["N"]]) for c in known] for key in ("paper to K alone", "paper to reference")
    )
    nearer = known and all(a < b for a, b in zip(alone, reference, strict=True))
    return f"""
**The published medians** are {published}. Measured here, for N = {small["N"]} and N = {large["N"]}, the paper's
bound is {both("paper")} above the norm. The paper took for the norm what the power method gives after 30 iterations
from a random vector. That lies {both("reference")} below the norm, so that the bound seems to be
{both("paper to reference")} too large: on large inputs because the reference has not converged, on small ones hardly
for that reason. Thirty multiplications by $K$ alone, without its adjoint, approach the spectral radius and not the
norm. Against them the bound would seem {both("paper to K alone", 1)} too
large{", nearer to the published numbers" if nearer else ""}. What was run for the paper cannot be known from here.
""".strip()


CLAIMS: dict[str, Callable[[Result], dict[str, bool]]] = {
    "tightness": tightness_claims,
    "pretrained": pretrained_claims,
    "cifar-grid": cifar_grid_page.claims,
    "imagenet": imagenet_page.claims,
    "timing": timing_claims,
}
SECTIONS: dict[str, Callable[[Result], str]] = {
    "tightness": tightness,
    "pretrained": pretrained,
    "cifar-grid": cifar_grid_page.section,
    "imagenet": imagenet_page.section,
    "timing": timing,
}
