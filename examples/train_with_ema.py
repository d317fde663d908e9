"""An average of the weights (EMA) and a checkpoint, beside a Normalizer: both stay within the norms.

python examples/train_with_ema.py
"""

import io

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import opnorm
from opnorm.models import ds_convnet


def main() -> float:
    """The largest norm of a layer of the average, of 2 that are allowed."""
    torch.manual_seed(0)
    model = ds_convnet()
    norm = opnorm.Normalizer(model, input_shape=(1, 8, 8), K=2.0, guarantee="upper")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norm.attach(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 1, 8, 8)), torch.randint(10, (32,))).backward()
        optimizer.step()
        average.update_parameters(model)

    file = io.BytesIO()  # singular vectors, scales and the number of steps are part of the model's state
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])

    operators = opnorm.operators_of(average.module, (1, 8, 8))
    largest = max(float(opnorm.operator_norm(o.detach(), guarantee="exact")) for o in operators.values())
    print(f"largest norm of a layer of the average: {largest:.6f}")  # norms are convex: never above K
    return largest


if __name__ == "__main__":
    main()
