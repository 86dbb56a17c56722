"""What Triton loads as backend `slipstream`."""

from slipstream.bridge.model import TritonPythonModel as TritonPythonModel
