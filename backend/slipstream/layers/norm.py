"""RMS normalisation as a layer."""

from torch import Tensor

from slipstream.kernels.elementwise import norm
from slipstream.layers.source import WeightSource


class Norm:
    """RMS norm over the last dimension, with a learned weight, or one more than that (Gemma)."""

    def __init__(self, w: WeightSource, size: int, eps: float, plus_one: bool = False) -> None:
        self.weight = w.tensor("weight", size)
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""
        return norm.rms_norm(x, self.weight, self.eps, self.plus_one)
