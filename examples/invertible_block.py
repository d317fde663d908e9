"""An invertible residual network (Behrmann et al. 2019): it learns to blur, and is then run backwards.

y = x + f(x) is invertible where f has a Lipschitz constant L < 1, and x ← y - f(x) finds x: each round divides the
error by at least 1/L. The inverse magnifies a change of y by at most 1/(1-L), which certify proves block by block.

python examples/invertible_block.py
"""

import math

import torch
from torch import Tensor, nn

import opnorm


class Block(nn.Module):
    """x + f(x), f with two convolutions and an activation of slope at most 1 between."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, channels, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)

    @torch.no_grad()
    def inverse(self, y: Tensor, lipschitz: float, relative_error: float) -> Tensor:
        """x with forward(x) = y, within this part of the first step: after n rounds the error is Lⁿ/(1-L) of it."""
        x = y
        for _ in range(rounds(lipschitz, relative_error)):
            x = y - self.branch(x)
        return x


def rounds(lipschitz: float, relative_error: float) -> int:
    """The n with Lⁿ/(1-L) ≤ error."""
    return math.ceil(math.log(relative_error * (1 - lipschitz)) / math.log(lipschitz))


def main(steps: int = 100) -> tuple[list[float], float]:
    """The certified constants of the branches, and the largest error of the inverse."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(1, 16), Block(1, 16), Block(1, 16)).double()
    # 0.7 for each branch: √0.7 for each of its two convolutions, and never above, since every step is proved
    norm = opnorm.Normalizer(model, input_shape=(1, 12, 12), K=math.sqrt(0.7), scaling="cap", guarantee="upper")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    norm.attach(optimizer)
    for _ in range(steps):
        x = torch.rand(32, 1, 12, 12, dtype=torch.float64)
        blurred = (x + nn.functional.avg_pool2d(x, 3, 1, 1)) / 2
        optimizer.zero_grad()
        loss = (model(x) - blurred).square().mean()
        loss.backward()
        optimizer.step()
    norm.remove()

    constants = [opnorm.certify(block.branch, (1, 12, 12), lower=False).bound for block in model]
    with torch.no_grad():
        x = torch.rand(32, 1, 12, 12, dtype=torch.float64)
        y = model(x)
    for block, constant in zip(reversed(model), reversed(constants), strict=True):
        y = block.inverse(y, constant, relative_error=1e-9)
    error = float((y - x).abs().max())
    print(f"loss {loss:.2e}; branches: {', '.join(f'L ≤ {c:.4f}' for c in constants)}")
    print(f"the inverse magnifies a change at most {math.prod(1 / (1 - c) for c in constants):.1f} times")
    print(f"largest error of what is recovered: {error:.1e}")
    return constants, error


if __name__ == "__main__":
    main()
