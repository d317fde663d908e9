"""`MemoryImages`: small images held as one tensor, augmented a batch at a time where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from opnorm.lab.data import Request, generator


@dataclass(frozen=True)
class MemoryImages:
    """Images and labels as tensors.

    Attributes:
        images: (n, C, H, W), uint8.
        labels: (n,), int64.
        white: the largest value that a pixel can have.
        padding: training images are padded by this many black pixels a side, and cropped at random to their size.
        flip: whether half of the training images, at random, are mirrored.
    """

    images: Tensor
    labels: Tensor
    white: int = 255
    padding: int = 0
    flip: bool = False

    def to(self, device: torch.device) -> MemoryImages:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def fetch(self, requests: Iterable[Request], device: torch.device, workers: int) -> Iterator[Tensor]:
        for request in requests:
            batch = self.images[request.wanted.to(self.images.device)]
            if request.seed is not None and (self.padding or self.flip):
                batch = self._augmented(batch, request.seed, len(request.indices), request.share)
            yield batch.to(device, torch.float32).div_(self.white)

    def _augmented(self, batch: Tensor, seed: int, n: int, share: slice) -> Tensor:
        """The share of a batch of n images, moved and mirrored as in the whole of it."""
        random = generator(seed)
        tops, lefts = torch.randint(2 * self.padding + 1, (2, n), generator=random)[:, share]
        flips = (torch.rand(n, generator=random)[share] < 0.5) & self.flip
        return cropped(batch, self.padding, tops, lefts, flips)


def cropped(batch: Tensor, padding: int, tops: Tensor, lefts: Tensor, flips: Tensor) -> Tensor:
    """y[b, c, i, j] = padded[b, c, tops[b] + i, lefts[b] + j], with j counted from the right where flips[b].

    One gather for the whole batch.

    Args:
        batch: (n, C, H, W).
        padding: zeros on each side.
        tops, lefts, flips: (n,), from 0 to 2·padding, and booleans.
    """
    n, channels, height, width = batch.shape
    device = batch.device
    rows = tops.view(-1, 1) + torch.arange(height)
    columns = torch.arange(width)
    columns = lefts.view(-1, 1) + torch.where(flips.view(-1, 1), width - 1 - columns, columns)
    padded = F.pad(batch, (padding,) * 4)
    which = torch.arange(n, device=device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, channels, 1, 1)
    return padded[which, channel, rows.to(device).view(n, 1, -1, 1), columns.to(device).view(n, 1, 1, -1)]
