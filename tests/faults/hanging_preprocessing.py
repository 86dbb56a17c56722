"""Backend `slipstream_preprocessing` of a test: as it is served, but for some texts.

`HANG` never ends, while the process lives on; `FREEZE` neither, and nothing else in the process
moves; `SPIN` takes four seconds of a processor. The preprocessing of texts begins with their look.
"""

import ctypes
import time
from typing import Any

from slipstream_preprocessing import stage

HANG, FREEZE, SPIN = b"HANG", b"FREEZE", b"SPIN"
SPIN_S = 4.0
_encode_batch = stage.encode_batch


def _encode(encoder: Any, inputs: dict[str, Any]) -> Any:
    text = bytes(inputs["QUERY"].ravel()[0])
    if text == HANG:
        time.sleep(3600)
    if text == FREEZE:
        ctypes.PyDLL(None).sleep(3600)  # without letting other threads have the interpreter
    begin = time.thread_time()
    while text == SPIN and time.thread_time() - begin < SPIN_S:
        pass
    return _encode_batch(encoder, inputs)


class TritonPythonModel(stage.TritonPythonModel):
    """As it is served, but for some texts."""

    def initialize(self, args: dict[str, str]) -> None:
        """Look at the texts first."""
        stage.encode_batch = _encode
        super().initialize(args)
