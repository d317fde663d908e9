"""Train with every layer's norm at most 3, and let each layer learn how much of it to use.

python examples/train_soft_scaling.py        (needs scikit-learn, for its digits; 20 seconds on a CPU)
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import opnorm
from opnorm.models import ds_convnet


def main(epochs: int = 20) -> float:
    """The accuracy on the last 400 digits."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.5
    y = torch.tensor(digits.target)
    model = ds_convnet()
    norm = opnorm.Normalizer(model, input_shape=(1, 8, 8), K=3.0, scaling="soft")
    scales = norm.scale_parameters()
    weights = [p for p in model.parameters() if all(p is not s for s in scales)]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 1e-4}, {"params": scales, "lr": 0.02}], lr=0.02, momentum=0.9
    )
    norm.attach(optimizer)
    for _ in range(epochs):
        for batch in torch.randperm(len(x) - 400).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    print(norm.table())
    norm.remove()  # plain modules again: export them, or certify them
    accuracy = float((model(x[-400:]).argmax(1) == y[-400:]).float().mean())
    print(f"accuracy {accuracy:.1%}, {opnorm.certify(model, (1, 8, 8)).bound:.3g} times the input's change at most")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
