"""A network with an operation that opnorm does not know: refused at first, certified with a rule of your own.

python examples/certify_own_rule.py
"""

import torch
from torch import nn

import opnorm


class Sinc(nn.Module):
    """x ↦ sin(πx)/(πx), whose slope is at most 1.3705, at x = 0.6626."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(x)


def main() -> None:
    """Refused, then certified."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Sinc(), nn.LayerNorm(16), nn.Linear(16, 3))
    try:
        opnorm.certify(model, (8,))
    except ValueError as error:
        print(error)

    @opnorm.lipschitz_rule(torch.ops.aten.sinc.default)
    def sinc(call: opnorm.rules.Call) -> opnorm.rules.Factor:
        return opnorm.rules.Elementwise(1.3705, call.operand.ndim)  # the same in every entry: channels stay apart

    model[2] = nn.BatchNorm1d(16)  # a layer norm has no useful constant; a batch norm is a diagonal in eval mode
    print(f"\ncertified: {opnorm.certify(model, (8,)).bound:.4f}")


if __name__ == "__main__":
    main()
