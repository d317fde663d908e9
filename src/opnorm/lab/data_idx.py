"""`fashion_mnist`: 28×28 images of clothes in idx files, as the MNIST family has them, packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from opnorm.lab.data import Data, DataError
from opnorm.lab.data_memory import MemoryImages

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SOURCE = "https://github.com/zalandoresearch/fashion-mnist"
UNSIGNED_BYTES = 8  # the type's code in the header


def fashion_mnist(path: Path | None) -> Data:
    """Fashion-MNIST from a folder with its four files; training images padded by 2, cropped and mirrored at random."""
    if path is None:
        raise DataError(f"expected --data-path as a folder with the four idx files; get them from {SOURCE}")
    train, test = (_split(path, prefix) for prefix in ("train", "t10k"))
    prepared = MemoryImages(train.images, train.labels, padding=2, flip=True)
    return Data("fashion-mnist", prepared, test, CLASSES, (1, 28, 28), (0.2860,), (0.3530,))


def _split(folder: Path, prefix: str) -> MemoryImages:
    image_file, label_file = (_file(folder, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(image_file, (None, 28, 28)), read_idx(label_file, (None,)).to(torch.int64)
    if len(images) != len(labels):
        counts = f"{len(labels)} in {label_file} and {len(images)} in {image_file}"
        raise DataError(f"expected as many labels as images, got {counts}")
    if len(labels) and int(labels.max()) > 9:
        at = int((labels > 9).nonzero()[0])
        found = f"expected labels of 0 to 9, got {int(labels[at])} at {at}"
        raise DataError(f"{label_file} is mislabelled: {found}; get it again from {SOURCE}")
    return MemoryImages(images.unsqueeze(1), labels)


def _file(folder: Path, name: str) -> Path:
    places = (folder / name, folder / f"{name}.gz")
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise DataError(f"expected {name} or {name}.gz in {folder}, got neither; get it from {SOURCE}")
    return found


def read_idx(file: Path, shape: tuple[int | None, ...]) -> Tensor:
    """The array of unsigned bytes in an idx file: two zeros, type, dimensions, a size for each, then the values.

    Args:
        file: the file; unpacked where it ends in .gz.
        shape: the sizes that it has to have, None for any that is not zero.
    """
    again = f"get it again from {SOURCE}"
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}; {again}") from error
    start = 4 + 4 * len(shape)
    if content[:4] != bytes([0, 0, UNSIGNED_BYTES, len(shape)]) or len(content) < start:
        kind = f"idx file of bytes in {len(shape)} dimensions"
        raise DataError(f"{file} is no {kind}: it begins with {content[:4].hex() or 'nothing'}; {again}")
    sizes = [int.from_bytes(content[i : i + 4]) for i in range(4, start, 4)]
    if any(n != (n if m is None else m) or n == 0 for n, m in zip(sizes, shape, strict=True)):
        wanted = "×".join("n" if m is None else str(m) for m in shape)
        raise DataError(f"{file} is corrupt: expected {wanted} values, got {'×'.join(map(str, sizes))}; {again}")
    got, values = len(content) - start, math.prod(sizes)
    if got != values:
        state = "truncated" if got < values else "too long"
        raise DataError(f"{file} is {state}: expected {values:,} values, got {got:,}; {again}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(sizes)
