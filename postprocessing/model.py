"""The module that Triton loads as backend `slipstream_postprocessing`."""

from slipstream_postprocessing.stage import TritonPythonModel as TritonPythonModel
