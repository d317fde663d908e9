"""`opnorm bench WHAT`: measurements, each a command that writes one JSON file. Losses are recorded beside wins."""

from __future__ import annotations

from collections.abc import Sequence

from opnorm.lab.cli import Command, choose

BENCHMARKS = {
    "norms": Command("opnorm.lab.bench.norms", "tightness and time on MobileNetV2, the paper's bound and ours"),
    "small": Command("opnorm.lab.bench.small", "small inputs and large kernels, where the embedding alone is loose"),
    "step": Command("opnorm.lab.bench.step", "what normalisation adds to a training step, next to other ways"),
    "train": Command("opnorm.lab.bench.train", "the training loop, with data and logs, next to the bare step"),
    "memory": Command("opnorm.lab.bench.memory", "peak memory and time of large layers, the paper's bound and ours"),
    "peers": Command(
        "opnorm.lab.bench.peers", "published methods and packages, on many layers: tightness, time, peak memory"
    ),
}

START = """\
opnorm bench: measurements of this library, written as JSON

{commands}

For example:
  opnorm bench norms --weights mobilenetv2.safetensors --json results/norms_mobilenet_v2.json
  opnorm bench peers --weights mobilenetv2.safetensors --out results/peers
"""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first argument names."""
    return choose(argv, BENCHMARKS, START, "opnorm bench")
