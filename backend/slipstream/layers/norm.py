"""RMS normalisation as a layer."""

from torch import Tensor

from slipstream.kernels import norm
from slipstream.layers.source import WeightSource


class Norm:
    """RMS norm over the last dimension, with a learned weight."""

    def __init__(self, w: WeightSource, size: int, eps: float) -> None:
        self.weight = w.tensor("weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""
        return norm.rms_norm(x, self.weight, self.eps)
