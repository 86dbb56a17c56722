"""Backend `slipstream_postprocessing` of a benchmark: notes when texts are given to the server."""

import time
from collections.abc import Sequence
from typing import Any

from handover_journal import HandoverJournal
from slipstream_postprocessing import stage

_make_text = stage.detokenize
_counts: list[int] = []  # of this call, request by request


def _noting_detokenize(*args: Any) -> str:
    text = _make_text(*args)
    _counts.append(len(text))  # the source's tokens are a letter each
    return text


class TritonPythonModel(stage.TritonPythonModel):
    """Model as it is served, with notes."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begin the journal."""
        self._journal = HandoverJournal(args["model_name"])
        stage.detokenize = _noting_detokenize
        super().initialize(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Texts, and then a note of each."""
        _counts.clear()
        responses = super().execute(requests)
        now_ns = time.time_ns()
        for request, count in zip(requests, _counts, strict=True):
            self._journal.add(request.request_id(), now_ns, count)
        return responses

    def finalize(self) -> None:
        """End it."""
        super().finalize()
        self._journal.close()
