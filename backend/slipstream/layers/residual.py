"""The sum that the blocks of a model add to."""

from torch import Tensor

from slipstream.kernels.elementwise import fp8
from slipstream.layers.norm import Norm


class Residual:
    """`[n, hidden]`, changed in place. What is added later is added on the way to the next norm."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._addend: tuple[Tensor, fp8.Scales] | None = None

    def __len__(self) -> int:
        return self._values.shape[0]

    @property
    def values(self) -> Tensor:
        """The sum so far."""
        if self._addend is not None:
            product, scales = self._addend
            fp8.add_scaled(self._values, product, *scales)
            self._addend = None
        return self._values

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, `[r] i64`, which are `0 .. r - 1` from now on."""
        self._values = self.values[rows]

    def add_later(self, product: Tensor, scales: fp8.Scales) -> None:
        """Add an e4m3 product `[n, hidden]` before anybody sees the sum."""
        assert self._addend is None, "a block looks at the sum before it adds to it"
        self._addend = (product, scales)

    def quantized(self, norm: Norm) -> fp8.Quantized:
        """`norm` of the sum, in e4m3."""
        if self._addend is None:
            return fp8.norm_quantize(self._values, norm.weight, norm.eps)
        product, (rows, columns, bias) = self._addend
        self._addend = None
        return fp8.add_norm_quantize(
            self._values, norm.weight, product, rows, columns, norm.eps, bias
        )
