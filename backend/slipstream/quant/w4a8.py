"""Weights in 4 bits by 128 inputs, made of 16 bits as they are loaded; rows in e4m3.

Where no GEMM takes rows so, they stay in 16 bits; the start says which.
"""

from slipstream.quant.auto import AtLoad
from slipstream.quant.rounding import rounded_for_e4m3

SCHEME = AtLoad("w4a8", rounded_for_e4m3)
