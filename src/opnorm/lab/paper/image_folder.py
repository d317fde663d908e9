"""`write_images`: a folder of image files as ImageNet has them, made from a data set in memory."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from opnorm.lab.data import Data, Images
from opnorm.lab.data_memory import MemoryImages

SIZE = (500, 375)  # width and height of most images of ImageNet
QUALITY = 90


def write_images(data: Data, folder: Path, train: int, test: int = 20, size: tuple[int, int] | None = SIZE) -> str:
    """Write the first training and test images into folder/train and folder/val, one folder a class; a note.

    Args:
        data: images in memory, such as CIFAR-10.
        folder: where to write.
        train, test: how many; of each class as many as come up, one at least.
        size: width and height, as JPEG; None: as they are, as PNG.
    """
    for name, images, count in (("train", data.train, train), ("val", data.test, test)):
        _write(images, data.classes, folder / name, count, size)
    width, height = size or data.shape[:0:-1]
    return f"files of {width}×{height} pixels made from {data.name}: {train:,} training images"


def _write(images: Images, classes: tuple[str, ...], folder: Path, count: int, size: tuple[int, int] | None) -> None:
    if not isinstance(images, MemoryImages):
        raise ValueError(f"expected images in memory, got {type(images).__name__}; files are there already")
    labels = images.labels.tolist()
    firsts = [labels.index(label) for label in range(len(classes))]  # no class may be empty
    chosen = [*firsts, *(i for i in range(len(labels)) if i not in {*firsts})][:count]
    for name in classes:
        (folder / name).mkdir(parents=True)
    for index in chosen:
        pixels = images.images[index].permute(1, 2, 0).contiguous().numpy()
        picture, path = Image.fromarray(pixels), folder / classes[labels[index]] / f"{index:05}"
        if size is None:
            picture.save(path.with_suffix(".png"))
        else:
            picture.resize(size, Image.Resampling.BICUBIC).save(path.with_suffix(".jpg"), quality=QUALITY)
