"""A Wasserstein critic that is 1-Lipschitz by its layers, on two Gaussians whose distance is known.

The critic sees real and generated samples before each of its steps. Its weights are normalised after the step,
in place, so that no power iteration hides in the forward pass, and two forwards see the same weights.

python examples/gan_critic.py
"""

import torch
from torch import nn

import opnorm


def main(steps: int = 300) -> float:
    """The estimated distance; the true one is 2, the distance of the means."""
    torch.manual_seed(0)
    shift = torch.zeros(8)
    shift[0] = 2.0
    critic = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    norm = opnorm.Normalizer(critic, input_shape=(8,), K=1.0, guarantee="upper")
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    norm.attach(optimizer)
    for _ in range(steps):
        real, generated = torch.randn(256, 8) + shift, torch.randn(256, 8)
        optimizer.zero_grad()
        (critic(generated).mean() - critic(real).mean()).backward()
        optimizer.step()
    norm.detach()
    with torch.no_grad():
        distance = float(critic(torch.randn(20000, 8) + shift).mean() - critic(torch.randn(20000, 8)).mean())
    print(norm.table())
    print(f"distance at least {distance:.3f}; true: 2")  # a 1-Lipschitz critic never overestimates, but for sampling
    return distance


if __name__ == "__main__":
    main()
