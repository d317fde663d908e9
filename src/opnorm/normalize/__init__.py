"""`Normalizer`: keeps the layers of a model at the norms that you set, at a few milliseconds a step."""

from opnorm.normalize.normalizer import Normalizer

__all__ = ["Normalizer"]
