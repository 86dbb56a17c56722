"""Weights in 4 bits by 64 inputs with zeros, made of 16 bits as they are loaded."""

from collections.abc import Sequence

from slipstream.kernels.gemm.op import Matrix
from slipstream.quant.auto import Auto, kept
from slipstream.quant.forms import Packed
from slipstream.quant.rounding import rounded4
from slipstream.quant.scheme import MatrixSource


class Int4(Auto):
    """Activations stay in 16 bits; `kept` says whether weights must be dequantised again."""

    name = "int4"

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix | Packed:
        """Read `NAME.weight` of all names and round them."""
        weight = w.packed([f"{name}.weight" for name in names], outputs, inputs)
        return Matrix(weight) if weight.is_meta else kept(w, rounded4(weight))


SCHEME = Int4()
