"""Weights in 8 bits with a scale for each output, made of 16 bits as they are loaded."""

from slipstream.quant.auto import AtLoad
from slipstream.quant.rounding import rounded8

SCHEME = AtLoad("int8", rounded8)
