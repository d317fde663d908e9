"""opnorm: the operator norm of the layers of a PyTorch network, computed, enforced and certified.

Everything exported here needs torch alone. What reads files, trains or prints lives in `opnorm.lab`, an extra.
"""

from opnorm.bound import Method, NormBound
from opnorm.certify import Certificate, certify
from opnorm.geometry import ConvGeometry
from opnorm.layers import operators_of
from opnorm.normalize import Normalizer
from opnorm.norms import Exact, FourierBound, GramIteration, PowerIteration, auto, conv_norm, joint_norm, operator_norm
from opnorm.operator import ConvOperator
from opnorm.rules import lipschitz_rule

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "ConvGeometry",
    "ConvOperator",
    "Exact",
    "FourierBound",
    "GramIteration",
    "Method",
    "NormBound",
    "Normalizer",
    "PowerIteration",
    "__version__",
    "auto",
    "certify",
    "conv_norm",
    "joint_norm",
    "lipschitz_rule",
    "operator_norm",
    "operators_of",
]
