"""Initialisation without batch norm: every layer keeps the mean square of its signal.

With zero-mean weights of variance g²/n, n the number of weights behind one output, a layer maps a signal of mean square
q to one of mean square g²q, in expectation over the weights, whatever the mean of the signal and its correlations. So

* g = √2 where a ReLU follows, since it halves the mean square of a symmetric signal (He et al. 2015);
* g = 1 where none follows: between a depthwise and its pointwise layer, and for the classifier;
* g = 1/√B at the end of each of B residual branches: the mean square grows by at most (1 + 1/B)^B < e in all, where
  branches of gain 1 double it in each block.

Not Fixup or SkipInit, which start the branches at zero: here every layer is to be divided by its norm, and a layer of
zeros has none to divide by; and a learnable factor on a branch would be one more thing to bound.

Spectral normalisation forgets the scale chosen here and keeps the shape: the ratio of a layer's mean gain to its norm.
For a Gaussian separable layer with its ReLU that is about 0.1. With norm K = 5 two of them make a branch of gain 1/3,
near the 1/√B above: the signal keeps its scale through `ds_resnet34` just where the paper finds its best accuracy. An
isometry (orthogonal pointwise weights, say) has a ratio near 1; with K = 5 the first logits would be 10^18.
"""

from __future__ import annotations

import math

import torch
from torch import nn

RELU_GAIN = math.sqrt(2.0)


@torch.no_grad()
def keep_mean_square_(layer: nn.Conv2d | nn.Linear, gain: float = 1.0) -> None:
    """θ ~ N(0, gain²/n), n the number of weights behind one output, and bias 0; in place."""
    layer.weight.normal_(0.0, gain / math.sqrt(layer.weight[0].numel()))
    if layer.bias is not None:
        layer.bias.zero_()
