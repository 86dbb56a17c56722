"""Make the tensors of a response besides its tokens: log probs, indices, counts and times.

Both wirings with TensorRT-LLM's tensors share it. All shapes have the batch dimension, which is 1:
a request of batch B is answered by B streams.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import DTypeLike
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.request import ResponseOptions

from slipstream import wire
from slipstream.bridge.streams import Outputs


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence in one response."""

    token_ids: list[int]
    log_probs: list[float]
    drop_bytes: int
    finished: wire.Finished | None
    values: tuple[wire.Values, ...] = ()


def merge(tokens: Sequence[wire.Tokens]) -> Piece:
    """Return several `Tokens` of one sequence, in order, as one piece."""
    if len(tokens) == 1:
        [only] = tokens
        values = () if only.values is None else (only.values,)
        return Piece(only.token_ids, only.log_probs, only.drop_bytes, only.finished, values)
    token_ids: list[int] = []
    log_probs: list[float] = []
    drop_bytes, finished = 0, None
    for each in tokens:
        assert drop_bytes == 0, "only the last tokens of a sequence are cut"
        token_ids += each.token_ids
        log_probs += each.log_probs
        drop_bytes, finished = each.drop_bytes, each.finished
    own = tuple(each.values for each in tokens if each.values is not None)
    return Piece(token_ids, log_probs, drop_bytes, finished, own)


class Extras:
    """The optional outputs of one sequence, response by response."""

    def __init__(
        self,
        options: ResponseOptions,
        num_input_tokens: int,
        batch_index: int | None,
        sequence_index: int | None,
        wanted: LogProbs | None,
    ) -> None:
        """Start; `batch_index` is None for a batch of one, `sequence_index` for n = 1."""
        self._options = options
        self._num_input_tokens = num_input_tokens
        indices = {"batch_index": batch_index, "sequence_index": sequence_index}
        self._indices = {name: index for name, index in indices.items() if index is not None}
        self._cum_log_prob = 0.0
        self._wanted = wanted or LogProbs()

    def make(self, piece: Piece) -> Outputs:
        """Return the requested outputs of one response; counts are of this response alone.

        `cum_log_probs` is the sum over all tokens so far; times and block counts come with the last
        response.
        """
        options = self._options
        outputs = {name: _scalar(index, np.int32) for name, index in self._indices.items()}
        if options.log_probs:
            self._cum_log_prob += sum(piece.log_probs)
            outputs["cum_log_probs"] = _scalar(self._cum_log_prob, np.float32)
            outputs["output_log_probs"] = np.array([[piece.log_probs]], np.float32)
        outputs |= self._logits(piece)
        if options.num_input_tokens:
            outputs["num_input_tokens"] = _scalar(self._num_input_tokens, np.int32)
        if options.num_output_tokens:
            outputs["num_output_tokens"] = _scalar(len(piece.token_ids), np.int32)
        if options.perf_metrics and piece.finished is not None:
            outputs |= perf_outputs(piece.finished.perf)
        return outputs

    def _logits(self, piece: Piece) -> Outputs:
        """Return whole logits: of the new tokens, and once of the prompt's."""
        outputs: dict[str, np.ndarray] = {}
        if self._wanted.generation_logits:
            rows = [row for values in piece.values for row in values.logits]
            outputs["generation_logits"] = _rows(rows, len(rows))[None, None]
        context = [part for values in piece.values for part in values.context]
        if self._wanted.context_logits and context:
            count = sum(values.num_context for values in piece.values)
            outputs["context_logits"] = _rows(context, count)[None]
        return outputs


def _rows(parts: Sequence[bytes], count: int) -> np.ndarray:
    """Return `count` rows of fp32 logits."""
    values = np.frombuffer(b"".join(parts), np.float32)
    return values.reshape(count, len(values) // max(1, count))


def perf_outputs(perf: wire.Perf) -> dict[str, np.ndarray]:
    """Return the times, blocks and drafts of a sequence, each of shape [1, 1]."""
    return {
        "arrival_time_ns": _scalar(perf.arrival_ns, np.int64),
        "first_scheduled_time_ns": _scalar(perf.first_scheduled_ns, np.int64),
        "first_token_time_ns": _scalar(perf.first_token_ns, np.int64),
        "last_token_time_ns": _scalar(perf.last_token_ns, np.int64),
        "kv_cache_alloc_new_blocks": _scalar(perf.kv_alloc_new_blocks, np.int32),
        "kv_cache_reused_blocks": _scalar(perf.kv_reused_blocks, np.int32),
        "kv_cache_alloc_total_blocks": _scalar(perf.kv_alloc_total_blocks, np.int32),
        "acceptance_rate": _scalar(perf.num_accepted / max(1, perf.num_drafted), np.float32),
        "total_accepted_draft_tokens": _scalar(perf.num_accepted, np.int32),
        "total_draft_tokens": _scalar(perf.num_drafted, np.int32),
    }


def _scalar(value: float, dtype: DTypeLike) -> np.ndarray:
    return np.array([[value]], dtype)
