"""Methods that compute operator norms, one a file; published baselines in `opnorm.norms.baselines`."""

from opnorm.norms.exact import Exact
from opnorm.norms.fourier import FourierBound
from opnorm.norms.functional import auto, conv_norm, joint_norm, operator_norm
from opnorm.norms.gram import GramIteration
from opnorm.norms.power import PowerIteration

__all__ = [
    "Exact",
    "FourierBound",
    "GramIteration",
    "PowerIteration",
    "auto",
    "conv_norm",
    "joint_norm",
    "operator_norm",
]
