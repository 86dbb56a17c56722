"""Weights in 8 bits with a scale for each output, made of 16 bits as they are loaded; rows in int8.

Where no GEMM takes rows so, they stay in 16 bits; the start says which.
"""

from functools import partial

from slipstream.quant.auto import AtLoad
from slipstream.quant.rounding import rounded8

SCHEME = AtLoad("w8a8", partial(rounded8, row_type="int8"))
