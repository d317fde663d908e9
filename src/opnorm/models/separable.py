"""`SeparableConv2d`, the layer that the paper is about, and the argument checks that the models share."""

from __future__ import annotations

from torch import Tensor, nn

from opnorm.models.init import keep_mean_square_


class SeparableConv2d(nn.Module):
    """y = Θ(θ ∗ x) + b: one k×k kernel a channel, then a matrix across the channels, with no activation between.

    Its norm is at most ‖Θ‖·‖θ∗‖, and at most the joint norm of both (`opnorm.joint_norm`), which is tighter.

    Args:
        in_channels: as in `torch.nn.Conv2d`.
        out_channels: likewise.
        kernel_size: odd; the padding is half of it, so that stride 1 keeps the size of the image.
        stride: of the depthwise convolution.
        multiplier: how many kernels each input channel has.
        gain: the factor by which the initial weights raise the root mean square; see `opnorm.models.init`.

    Only the pointwise layer has a bias: that of a depthwise layer would reach the output as one more constant, Θb.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        multiplier: int = 1,
        gain: float = 1.0,
    ):
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"expected an odd kernel_size, got {kernel_size}; use torch.nn.Conv2d for even ones")
        inner = in_channels * multiplier
        self.depthwise = nn.Conv2d(
            in_channels, inner, kernel_size, stride, padding=kernel_size // 2, groups=in_channels, bias=False
        )
        self.pointwise = nn.Conv2d(inner, out_channels, 1)
        keep_mean_square_(self.depthwise)
        keep_mean_square_(self.pointwise, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(x))


def require_counts(**counts: int) -> None:
    """Refuse what is not an integer of at least 1, with its name."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"expected {name} as an integer of at least 1, got {count!r}")
