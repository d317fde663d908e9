"""Rules: how each operation of a network bounds ‖f(x) - f(y)‖, and how the bounds are put together.

A rule is given a `Call` and returns a constant, a `Factor` (a map with constants a channel, or with a norm that can be
taken with weights), or values. Importing this package registers the rules for the operations of torch.
"""

from opnorm.rules import activations, arithmetic, linear, pooling, shapes
from opnorm.rules.expression import Apply, Concat, Extremum, Source, Sum, Value, Where
from opnorm.rules.factors import (
    Blockwise,
    Convolution,
    Depthwise,
    Diagonal,
    Elementwise,
    Factor,
    Matrix,
    Opaque,
    Relabel,
)
from opnorm.rules.registry import Call, Refused, Unusable, forget, known, lipschitz_rule

__all__ = [
    "Apply",
    "Blockwise",
    "Call",
    "Concat",
    "Convolution",
    "Depthwise",
    "Diagonal",
    "Elementwise",
    "Extremum",
    "Factor",
    "Matrix",
    "Opaque",
    "Refused",
    "Relabel",
    "Source",
    "Sum",
    "Unusable",
    "Value",
    "Where",
    "activations",
    "arithmetic",
    "forget",
    "known",
    "linear",
    "lipschitz_rule",
    "pooling",
    "shapes",
]
