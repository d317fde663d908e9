"""`digits`: 1,797 handwritten digits of 8×8 pixels, which ship with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from opnorm.lab.data import Data, generator
from opnorm.lab.data_memory import MemoryImages


def digits() -> Data:
    """The digits, every class split 4 to 1 into training and test images, always the same way.

    Pixels are 0 to 16 in the file and 0 to 1 for the network: no mean is subtracted, so that a certified radius is in
    units of the pixels.
    """
    raw = load_digits()
    images = torch.as_tensor(raw.images).to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(raw.target).to(torch.int64)
    order = torch.randperm(len(labels), generator=generator("digits"))
    ranks = torch.zeros(len(labels), dtype=torch.int64)  # of each image among those of its class, in random order
    for label in range(10):
        of_class = order[labels[order] == label]
        ranks[of_class] = torch.arange(len(of_class))
    test = ranks % 5 == 0
    train_set, test_set = (MemoryImages(images[part], labels[part], white=16) for part in (~test, test))
    names = tuple(str(label) for label in range(10))
    note = f"{len(train_set.labels):,} training and {len(test_set.labels)} test images, split here at random"
    return Data("digits", train_set, test_set, names, (1, 8, 8), (0.0,), (1.0,), (note,))
