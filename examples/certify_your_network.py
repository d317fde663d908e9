"""How much can the output of a network change when its input does? A proven answer, and where it comes from.

python examples/certify_your_network.py
"""

from pathlib import Path

import torch
from torch import nn

import opnorm


class Block(nn.Module):
    """A depthwise-separable residual block."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.pointwise(self.norm(self.depthwise(x))))


def main() -> None:
    """The certificate, a radius, and a page."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        Block(16),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    certificate = opnorm.certify(model, (3, 32, 32))
    print(certificate)

    logits = model.eval()(torch.randn(4, 3, 32, 32))
    print("\nno change smaller than this changes the class:", certificate.radius(logits).tolist())

    Path("certificate.html").write_text(certificate.to_html(), encoding="utf-8")
    print("open certificate.html in a browser")


if __name__ == "__main__":
    main()
