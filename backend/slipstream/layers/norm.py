"""RMS normalisation as a layer."""

from torch import Tensor

from slipstream.kernels import norm
from slipstream.layers.source import WeightSource


class Norm:
    """RMS norm over the last dimension, with a learned weight; `offset` is added to it (Gemma)."""

    def __init__(self, w: WeightSource, size: int, eps: float, offset: float = 0.0) -> None:
        weight = w.tensor("weight", size)
        self.weight = weight + offset if offset else weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""
        return norm.rms_norm(x, self.weight, self.eps)
