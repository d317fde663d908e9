"""`load_data`: a data set by name, and its batches, each a function of the seed, the epoch and its number alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from opnorm.lab.cli import UsageError

Show = Callable[[str], None]


class DataError(UsageError, ValueError):
    """What is wrong with a file of data, which it names, and what to do."""


class Share(NamedTuple):
    """What one of several processes takes of every batch: images in a row, of which none has many more than another."""

    rank: int = 0
    ranks: int = 1

    def count(self, n: int) -> int:
        """How many of n images."""
        return (self.rank + 1) * n // self.ranks - self.rank * n // self.ranks

    def of(self, n: int) -> slice:
        """Which of n images; one that is not its own where there is none for it, since networks need some input."""
        start = self.rank * n // self.ranks
        return slice(start, start + max(1, self.count(n)))


ALL = Share()


class Request(NamedTuple):
    """The images of one batch: which, and the seed of their augmentation; None for test images, which have none.

    Only `share` of them is wanted: as the whole batch has them, since random numbers are drawn for all of it.
    """

    indices: Tensor
    seed: int | None
    share: slice = slice(None)

    @property
    def wanted(self) -> Tensor:
        """The images that are wanted."""
        return self.indices[self.share]


class Images(Protocol):
    """Images with labels, in memory or in files."""

    @property
    def labels(self) -> Tensor:
        """(n,), int64."""
        ...

    def fetch(self, requests: Iterable[Request], device: torch.device, workers: int) -> Iterator[Tensor]:
        """(batch, C, H, W) for each request, float32 with pixels from 0 to 1, on the device."""
        ...

    def to(self, device: torch.device) -> Images:
        """The same on another device; those in files stay there."""
        ...


@dataclass(frozen=True)
class Data:
    """Training and test images of one kind, and what a network needs to know of them.

    Attributes:
        name: of the data set.
        train, test: the images.
        classes: their names, by label.
        shape: (C, H, W) of an image as the network gets it.
        mean, std: per channel, of pixels from 0 to 1; a network gets (pixel - mean)/std.
        notes: what a person should know: batches that are missing, how the images were split.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Data:
        """The same with images on a device, where they are held in memory at all."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def steps(self, batch_size: int) -> int:
        """How many batches an epoch has, the last of which may be smaller."""
        return -(-len(self.train.labels) // batch_size)

    def training_batches(
        self, epoch: int, batch_size: int, seed: int, device: torch.device, *, start: int = 0, workers: int = 0,
        share: Share = ALL,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """Augmented batches (inputs, labels) of an epoch, from number `start` on.

        They depend on nothing but the arguments, so that a run goes on in the middle of an epoch without going through
        its beginning, and on any number of processes, each of which gets its `share` of every batch.
        """
        order = torch.randperm(len(self.train.labels), generator=generator(seed, "order", epoch))
        parts = enumerate(order.split(batch_size))
        requests = [Request(p, derived(seed, "batch", epoch, i), share.of(len(p))) for i, p in parts][start:]
        return self._batches(self.train, requests, device, workers)

    def test_batches(
        self, batch_size: int, device: torch.device, *, standardize: bool = True, workers: int = 0, share: Share = ALL
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order; with pixels from 0 to 1 where they are not standardized."""
        parts = torch.arange(len(self.test.labels)).split(batch_size)
        requests = [Request(part, None, share.of(len(part))) for part in parts]
        return self._batches(self.test, requests, device, workers, standardize)

    def _batches(
        self, images: Images, requests: list[Request], device: torch.device, workers: int, standardize: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        labels = images.labels.to(device)
        for request, pixels in zip(requests, images.fetch(requests, device, workers), strict=True):
            x = pixels.sub_(mean).div_(std) if standardize else pixels
            yield x.contiguous(memory_format=torch.channels_last), labels[request.wanted.to(device)]


def derived(*parts: int | str) -> int:
    """A seed from numbers and words, as different as can be for any two of them."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def generator(*parts: int | str) -> torch.Generator:
    """Random numbers of their own, whatever else has drawn some; on the CPU, and so the same for every device."""
    return torch.Generator().manual_seed(derived(*parts))


def load_data(name: str, path: Path | None = None, *, image_size: int | None = None, show: Show = print) -> Data:
    """The data set of this name.

    Args:
        name: one of `SETS`.
        path: the folder or archive; digits need none, and CIFAR-10 is downloaded without.
        image_size: for folders of images, the height and width to crop to.
        show: called with lines to show a person.
    """
    if name not in SETS:
        raise DataError(f"expected --data among {', '.join(SETS)}, got {name!r}")
    if image_size is not None and name not in ("imagenet", "folder"):
        raise DataError(f"expected --image-size with folders of images, got it with {name}; leave it out")
    if path is not None and not path.exists():
        raise DataError(f"expected --data-path as a folder or file that exists, got {path}")
    return SETS[name](path, image_size, show)


def _digits(path: Path | None, image_size: int | None, show: Show) -> Data:
    from opnorm.lab.data_digits import digits

    if path is not None:
        raise DataError(f"expected no --data-path for the digits, which ship with scikit-learn, got {path}")
    return digits()


def _cifar10(path: Path | None, image_size: int | None, show: Show) -> Data:
    from opnorm.lab.data_cifar import cifar10

    return cifar10(path, show)


def _fashion_mnist(path: Path | None, image_size: int | None, show: Show) -> Data:
    from opnorm.lab.data_idx import fashion_mnist

    return fashion_mnist(path)


def _imagenet(path: Path | None, image_size: int | None, show: Show) -> Data:
    from opnorm.lab.data_folder import imagenet

    return imagenet(path, image_size or 224)


def _folder(path: Path | None, image_size: int | None, show: Show) -> Data:
    from opnorm.lab.data_folder import folder

    return folder(path, image_size or 224)


SETS: dict[str, Callable[[Path | None, int | None, Show], Data]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "fashion-mnist": _fashion_mnist,
    "imagenet": _imagenet,
    "folder": _folder,
}
