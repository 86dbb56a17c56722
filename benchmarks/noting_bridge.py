"""Backend `slipstream` of a benchmark: the bridge, which notes when `send()` has returned."""

import time
from typing import Any

from handover_journal import HandoverJournal
from slipstream.bridge import model
from slipstream.bridge.streams import Outputs
from slipstream.bridge.triton import TritonReply
from slipstream_contract.stream_state import NUM_INTEGERS

_journals: list[HandoverJournal] = []  # of the one model of this process


class _NotingReply(TritonReply):
    def __init__(self, request: Any, *others: Any) -> None:
        super().__init__(request, *others)
        self._request_id = request.request_id()

    def send(self, outputs: Outputs, is_final: bool) -> None:
        super().send(outputs, is_final)
        now_ns = time.time_ns()
        if "text_output" in outputs:
            num_tokens = len(outputs["text_output"].ravel()[0])  # the source's are a byte each
        else:
            num_tokens = outputs["STREAM_STATE"].size - NUM_INTEGERS if outputs else 0
        _journals[0].add(self._request_id, now_ns, num_tokens)


class TritonPythonModel(model.TritonPythonModel):
    """Model as it is served, with notes."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begin the journal."""
        _journals.append(HandoverJournal(args["model_name"]))
        model.TritonReply = _NotingReply
        super().initialize(args)

    def finalize(self) -> None:
        """End it after all responses."""
        super().finalize()
        _journals.pop().close()
