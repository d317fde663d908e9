"""`cifar10`: the binary version of CIFAR-10, from a folder, from its archive, or downloaded."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from opnorm.lab.data import Data, DataError, Show
from opnorm.lab.data_download import Download, download
from opnorm.lab.data_memory import MemoryImages

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # Runkel et al. 2021, appendix B
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
RECORD, RECORDS = 1 + 3 * 32 * 32, 10_000  # a label and three planes of pixels; as many in every file
ARCHIVE = Download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5", "c32a1d4ab5d03f1284b67883e8d87530")
SUMS = {  # SHA-256
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def cifar10(path: Path | None, show: Show = print) -> Data:
    """CIFAR-10 as the paper prepares it: training images padded by 4, cropped and mirrored at random.

    Args:
        path: a folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, of which training batches may be
            missing, or one that holds that folder or the archive; or the archive. None: the archive is downloaded.
        show: called with lines to show a person.
    """
    where = download(ARCHIVE, show) if path is None else path
    source = _source(where)
    files = _of_archive(source) if source.is_file() else _of_folder(source)
    found = [name for name in TRAIN if name in files]
    if not found or TEST not in files:
        raise DataError(_missing(source, [*(() if found else TRAIN), *(() if TEST in files else (TEST,))]))
    images, labels = zip(*(_images(files[name], source, name) for name in found), strict=True)
    train = MemoryImages(torch.cat(images), torch.cat(labels), padding=4, flip=True)
    test = MemoryImages(*_images(files[TEST], source, TEST))
    return Data("cifar10", train, test, CLASSES, (3, 32, 32), MEAN, STD, _notes(found))


def _source(where: Path) -> Path:
    """The folder that holds batches, `where` or the one that the archive makes in it; or an archive."""
    if where.is_file():
        return where
    for place in (where, where / "cifar-10-batches-bin"):
        if any((place / name).is_file() for name in (*TRAIN, TEST)):
            return place
    archive = where / ARCHIVE.name
    return archive if archive.is_file() else where


def _notes(found: list[str]) -> tuple[str, ...]:
    absent = [name for name in TRAIN if name not in found]
    note = f"{len(found)} of 5 training batches, {len(found) * RECORDS:,} images; without {', '.join(absent)}"
    return (note,) if absent else ()


def _of_folder(folder: Path) -> dict[str, bytes]:
    found = {}
    for name in (*TRAIN, TEST):
        file = folder / name
        if file.is_file():
            try:
                found[name] = file.read_bytes()
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror}") from error
    return found


def _of_archive(archive: Path) -> dict[str, bytes]:
    """The files inside, which are not written to the disk."""
    found = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                content = tar.extractfile(member) if name in (*TRAIN, TEST) and member.isfile() else None
                if content is not None:
                    found[name] = content.read()
            while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                pass  # to the very end, where gzip has its checksum
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} is no whole archive: {error}; get it again from {ARCHIVE.url}") from error
    return found


def _images(content: bytes, source: Path, name: str) -> tuple[Tensor, Tensor]:
    """(n, 3, 32, 32) and (n,) from the records of one file."""
    file = f"{name} in {source}" if source.is_file() else str(source / name)
    again = f"get it again from {ARCHIVE.url}"
    if len(content) != RECORD * RECORDS:
        state = "truncated" if len(content) < RECORD * RECORDS else "too long"
        raise DataError(
            f"{file} is {state}: expected {RECORD * RECORDS:,} bytes, {RECORDS:,} records of {RECORD:,}, got "
            f"{len(content):,}; {again}"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(RECORDS, RECORD)
    labels = records[:, 0].to(torch.int64)
    wrong = (labels > 9).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        label = int(labels[at])
        raise DataError(f"{file} is mislabelled: expected labels of 0 to 9, got {label} in record {at}; {again}")
    if name in SUMS and hashlib.sha256(content).hexdigest() != SUMS[name]:
        raise DataError(f"{file} is corrupt: its SHA-256 is not the one of CIFAR-10's {name}; {again}")
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), labels


def _missing(source: Path, names: list[str]) -> str:
    pickled = "python" in source.name or (source.is_dir() and any(source.glob("**/data_batch_1")))
    version = ", but the Python version, which is pickled, and could run code" if pickled else ""
    return f"expected {', '.join(names)} in {source}, got none{version}; get the binary version from {ARCHIVE.url}"
