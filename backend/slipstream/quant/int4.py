"""Weights in 4 bits by 64 inputs with zeros, made of 16 bits as they are loaded."""

from slipstream.quant.auto import AtLoad
from slipstream.quant.rounding import rounded4

SCHEME = AtLoad("int4", rounded4)
