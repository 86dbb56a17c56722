"""The module that Triton loads as backend `slipstream_preprocessing`."""

from slipstream_preprocessing.stage import TritonPythonModel as TritonPythonModel
