"""`opnorm reproduce WHAT`: the figures and tables of Runkel et al. 2021, computed again, beside ours.

An experiment is a line in `EXPERIMENTS` and a module with

* one subclass of `Options`, and `PROFILES`, what the options are in each profile;
* `main(argv)`, by `page.reproduce`, which goes on where it was killed, and leaves `NAME.json`, of the name in
  `EXPERIMENTS`, as its last act but for drawing;
* where it needs data, `check(options)`: a `UsageError` says what is missing, in seconds, before anything long.

Its figure, its section of the page and the claims under the figure are functions of that file, under the same name in
`figures.FIGURES`, `sections.SECTIONS` and `sections.CLAIMS`; how well it repeats is a sentence in `noise.NOISE` and a
function in `noise.GAPS`. `opnorm reproduce all` needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from opnorm.lab.cli import Command, choose

EXPERIMENTS = {
    "tightness": Command("opnorm.lab.paper.tightness", "figure 2: how far bounds lie above the norm, by resolution"),
    "pretrained": Command("opnorm.lab.paper.pretrained", "section 4.1: the same on the kernels of a trained network"),
    "cifar-grid": Command("opnorm.lab.paper.cifar_grid", "table 1: accuracy by norm and learning rate, on CIFAR-10"),
    "imagenet": Command("opnorm.lab.paper.imagenet", "figure 3: MobileNetV2 by norm, on any folder of images"),
    "timing": Command("opnorm.lab.paper.timing", "table 2: the time of an epoch with and without normalisation"),
}
OTHERS = {
    "all": Command(
        "opnorm.lab.paper.everything", "all of these, one after the other, and the page; goes on after a kill"
    ),
    "figures": Command("opnorm.lab.paper.page", "the figures and the tables of the results that are there, again"),
    "compare": Command("opnorm.lab.paper.compare", "results with those of another folder, within the noise stated"),
}

START = """\
opnorm reproduce: the figures and tables of Runkel et al. 2021, computed again, beside ours

{commands}

For example:
  opnorm reproduce tightness --profile small
  opnorm reproduce all --data-path cifar-10-batches-bin --weights mobilenetv2.safetensors
"""


def main(argv: Sequence[str]) -> int:
    """Run what the first argument names."""
    return choose(argv, EXPERIMENTS | OTHERS, START, "opnorm reproduce")
