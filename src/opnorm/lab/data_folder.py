"""`imagenet` and `folder`: images in files, one folder a class, read by threads while the network computes.

Threads and not processes: Pillow lets go of Python's lock while it decodes and resizes, which is where the time goes.
So nothing is copied between processes, a list of a million paths exists once, and an error arrives as itself.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor

from opnorm.lab.data import Data, DataError, Request, derived

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # Runkel et al. 2021, appendix B
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
TEST_NAMES = ("val", "test", "valid", "validation")
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as usual since Szegedy et al. 2015
AHEAD = 3  # batches that are read before they are asked for
HELD_OUT = 5  # where there is no test folder, one image in so many

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class FileImages:
    """Image files with labels.

    Training images: a crop of random size, resized to `size`, mirrored at random. Test images: resized to `resize` in
    both directions, whatever their shape, then the centre of `size`; so the paper's appendix B says it.
    """

    files: tuple[str, ...]
    labels: Tensor
    size: int
    resize: int

    def to(self, device: torch.device) -> FileImages:
        return self

    def fetch(self, requests: Iterable[Request], device: torch.device, workers: int) -> Iterator[Tensor]:
        pool = ThreadPoolExecutor(workers or default_workers(), thread_name_prefix="images")
        waiting: deque[list[Future[Tensor]]] = deque()
        try:
            for request in requests:
                waiting.append([pool.submit(self.read, int(i), request.seed) for i in request.wanted])
                if len(waiting) > AHEAD:
                    yield _stacked(waiting.popleft(), device)
            while waiting:
                yield _stacked(waiting.popleft(), device)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def read(self, index: int, seed: int | None) -> Tensor:
        """(3, size, size) of uint8; with a seed, cropped and mirrored by it and the index."""
        file = self.files[index]
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} is no whole image: {error}; replace or remove it") from error
        if seed is None:
            prepared = _tested(image, self.size, self.resize)
        else:
            prepared = _trained(image, self.size, derived(seed, index))
        return torch.from_numpy(numpy.array(prepared)).permute(2, 0, 1)


def imagenet(path: Path | None, size: int = 224) -> Data:
    """ImageNet from a folder that holds `train` and `val`, and in both one folder a class."""
    if path is None:
        raise DataError(
            "expected --data-path as a folder with train and val, and in both one folder a class; ImageNet is given to "
            "registered users by https://www.image-net.org"
        )
    for name in ("train", "val"):
        if not (path / name).is_dir():
            raise DataError(f"expected a folder {name} in {path}, and in it one folder a class, got none")
    return _data("imagenet", path / "train", path / "val", size)


def folder(path: Path | None, size: int = 224) -> Data:
    """Any folder of images: `train` and `val` (or `test`) with one folder a class; or one folder a class itself."""
    if path is None:
        raise DataError("expected --data-path as a folder of images, with train and val, or one folder a class")
    if not path.is_dir():
        raise DataError(f"expected --data-path as a folder of images, got {path}, which is a file")
    test = next((path / name for name in TEST_NAMES if (path / name).is_dir()), None)
    if (path / "train").is_dir() and test is not None:
        return _data(path.name, path / "train", test, size)
    if (path / "train").is_dir() or test is not None:
        raise DataError(f"expected train and val in {path}, got only one of them; make the other")
    return _data(path.name, path, None, size)


def default_workers() -> int:
    """A thread for each core that this process may use, and one at least."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _data(name: str, train: Path, test: Path | None, size: int) -> Data:
    by_class = _files(train)
    classes = tuple(by_class)
    if test is None:
        held = {c: files[::HELD_OUT] if len(files) > 1 else [] for c, files in by_class.items()}
        by_class = {c: [f for f in files if f not in set(held[c])] for c, files in by_class.items()}
        notes: tuple[str, ...] = (f"no test folder: one image in {HELD_OUT} of each class, by name, is a test image",)
    else:
        held, notes = _files(test), ()
        odd = sorted({*held} ^ {*classes})
        if odd:
            raise DataError(f"expected the same classes in {train} and {test}, got {', '.join(odd[:4])} in only one")
    if not any(held.values()):
        raise DataError(f"expected at least two images in some class of {train}, to hold one out as a test image")
    resize = round(size * 256 / 224)
    train_set, test_set = (_labelled(files, classes, size, resize) for files in (by_class, held))
    return Data(name, train_set, test_set, classes, (3, size, size), MEAN, STD, notes)


def _labelled(by_class: dict[str, list[str]], classes: tuple[str, ...], size: int, resize: int) -> FileImages:
    files = tuple(file for c in classes for file in by_class[c])
    labels = torch.tensor([label for label, c in enumerate(classes) for _ in by_class[c]], dtype=torch.int64)
    return FileImages(files, labels, size, resize)


def _files(place: Path) -> dict[str, list[str]]:
    """{class: its image files}, all in alphabetical order."""
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {f.name: sorted(e.path for e in os.scandir(f) if e.name.lower().endswith(SUFFIXES)) for f in folders}
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise DataError(f"expected images in every class of {place}, got none in {', '.join(empty[:4])}")
    if len(found) < 2:
        raise DataError(f"expected one folder a class in {place}, at least two, got {len(found)}")
    return found


def _stacked(futures: list[Future[Tensor]], device: torch.device) -> Tensor:
    batch = torch.stack([future.result() for future in futures])
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True).to(torch.float32).div_(255)


def _trained(image: Image.Image, size: int, seed: int) -> Image.Image:
    chance = random.Random(seed)
    box = random_box(image.width, image.height, chance)
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if chance.random() < 0.5 else resized


def _tested(image: Image.Image, size: int, resize: int) -> Image.Image:
    start = (resize - size) // 2
    resized = image.resize((resize, resize), Image.Resampling.BILINEAR)
    return resized.crop((start, start, start + size, start + size))


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """(left, top, right, bottom) of a crop of random area, aspect and place; the centre where ten tries do not fit."""
    for _ in range(10):
        area = width * height * chance.uniform(*AREA)
        aspect = math.exp(chance.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = chance.randint(0, width - w), chance.randint(0, height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * ASPECT[1]))
    h = min(height, round(width / ASPECT[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
