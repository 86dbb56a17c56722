"""Serve NVIDIA's LLM-API model: one text in, and while it streams the whole text so far.

Differences from NVIDIA's own model, where that contradicts its config.pbtxt or leaves a client
waiting: numbers have the declared dtypes, not STRING, and a request that is stopped by its id ends
with what it has, not without an answer.
"""

import numpy as np
from numpy.typing import DTypeLike
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.whole import RUNNING

from slipstream import wire
from slipstream.bridge.beams import latest, text_of
from slipstream.bridge.bridge import Bridge, IncomingRequest
from slipstream.bridge.pieces import Piece, merge, perf_outputs
from slipstream.bridge.streams import Call, Credit, Outputs, Stream
from slipstream.bridge.text import Text, is_short, make_encoders

_REASONS = {
    wire.FinishReason.END: "stop",
    wire.FinishReason.STOP: "stop",
    wire.FinishReason.LENGTH: "length",
    wire.FinishReason.CANCELLED: "cancelled",
}


class LlmApi:
    """The wiring of the LLM-API model.

    Args:
        bridge, text: of this model.
        is_decoupled: whether a request may have several responses; if not, none may stream.
        block_size: tokens in a block of the KV cache.
    """

    def __init__(self, bridge: Bridge, text: Text, is_decoupled: bool, block_size: int) -> None:
        self._bridge = bridge
        self._text = text
        self._is_decoupled = is_decoupled
        self._block_size = block_size
        self._encoders = make_encoders()

    def start(self, incoming: IncomingRequest) -> None:
        """Start a request, in another thread if its prompt is long. Raises ContractError."""
        self._text.check_sizes(incoming.inputs.get("text_input"))
        request = llmapi_request(incoming.inputs, incoming.parameters)
        if request.is_stop:
            self._stop(incoming.request_id)
        self._bridge.raise_if_full()
        if request.options.is_streaming and not self._is_decoupled:
            raise ContractError(
                "streaming is true, but this model has one response a request: compose it as "
                "decoupled (`--contract llmapi,decoupled`) to stream",
            )
        if is_short(request.texts()):
            self._start(incoming, request)
            return
        self._encoders.submit(
            self._bridge.answer, incoming.reply, lambda: self._start(incoming, request)
        )

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown(cancel_futures=False)

    def _stop(self, request_id: str) -> None:
        """Have the request of that id end; the answer to `stop` itself is always an error."""
        if not request_id:
            raise ContractError("stop is true, but the request has no id to say which to cancel")
        self._bridge.calls.stop(request_id)
        raise ContractError(f"request {request_id!r:.64} is cancelled by stop", Code.CANCELLED)

    def _start(self, incoming: IncomingRequest, request: GenerateRequest) -> None:
        encoded = self._text.encode_request(request)
        call = Call(incoming.reply, incoming.request_id)
        n, is_streaming = encoded.sampling.n, request.options.is_streaming
        if encoded.sampling.beams is not None:
            streams = [Stream(LlmApiBeams(request, self._text, self._block_size), is_streaming)]
        else:
            writer = LlmApiWriter(request, n, self._text, self._block_size)
            streams = [Stream(writer, is_streaming, n)] * n
        submit = self._bridge.submit(call, encoded, streams, incoming)
        self._bridge.start(call, [submit])


class _Sequence:
    """The text and the end of one of the n sequences."""

    def __init__(self, text: Text, skip_special: bool | None, prompt: str) -> None:
        self.text = prompt
        self.cum_log_prob = 0.0
        self.finished: wire.Finished | None = None
        self._detokenizer = text.detokenizer(skip_special)

    @property
    def reason(self) -> str:
        return RUNNING if self.finished is None else _REASONS[self.finished.reason]

    @property
    def stop_reason(self) -> str:
        return RUNNING if self.finished is None else str(self.finished.stop_reason)

    def add(self, piece: Piece) -> None:
        if self.finished is None:
            is_last = piece.finished is not None
            self.text += self._detokenizer.decode([], piece, is_last)
            self.cum_log_prob += sum(piece.log_probs)
            self.finished = piece.finished


class LlmApiWriter:
    """Responses of all sequences of one prompt; each has the whole text so far."""

    def __init__(self, request: GenerateRequest, n: int, text: Text, block_size: int) -> None:
        self._options = request.options
        self._block_size = block_size
        prompt = request.text if request.options.echo else ""
        skip_special = request.options.skip_special_tokens
        self._sequences = [_Sequence(text, skip_special, prompt) for _ in range(n)]

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the text of every sequence, after the prompt if it is to be echoed."""
        options, sequences = self._options, self._sequences
        for index, sequence in enumerate(sequences):
            sequence.add(merge([each for each in tokens if each.index == index]))
        outputs = {"text_output": _strings([sequence.text for sequence in sequences])}
        if options.finish_reason:
            outputs["finish_reason"] = _strings([sequence.reason for sequence in sequences])
        if options.stop_reason:
            outputs["stop_reason"] = _strings([sequence.stop_reason for sequence in sequences])
        if options.cumulative_log_prob:
            sums = [sequence.cum_log_prob for sequence in sequences]
            outputs["cumulative_logprob"] = np.array(sums, np.float32)
        finished = sequences[0].finished
        if options.perf_metrics and is_last and finished is not None:
            outputs |= _perf(finished, self._block_size)
        return outputs


class LlmApiBeams:
    """Responses of a beam search; each has the whole text of every beam as it stands."""

    def __init__(self, request: GenerateRequest, text: Text, block_size: int) -> None:
        self._options = request.options
        self._block_size = block_size
        self._prompt = request.text if request.options.echo else ""
        self._text = text

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the text of every beam, after the prompt if it is to be echoed."""
        beams, finished = latest(tokens)
        options, skip = self._options, self._options.skip_special_tokens
        texts = [self._prompt + text_of(self._text, beam, [], skip) for beam in beams]
        outputs = {"text_output": _strings(texts)}
        ends = [(RUNNING if each.reason is None else _REASONS[each.reason]) for each in beams]
        if options.finish_reason:
            outputs["finish_reason"] = _strings(ends)
        if options.stop_reason:
            words = [RUNNING if each.reason is None else str(each.stop_reason) for each in beams]
            outputs["stop_reason"] = _strings(words)
        if options.cumulative_log_prob:
            sums = [beam.cum_log_prob for beam in beams]
            outputs["cumulative_logprob"] = np.array(sums, np.float32)
        if options.perf_metrics and finished is not None:
            outputs |= _perf(finished, self._block_size)
        return outputs


def _perf(finished: wire.Finished, block_size: int) -> Outputs:
    """Return the times and blocks of a sequence; a missed block is one of the prompt's."""
    shared = {name: array.reshape(-1) for name, array in perf_outputs(finished.perf).items()}
    reused = int(shared.pop("kv_cache_reused_blocks")[0])
    missed = max(0, -(-finished.num_input_tokens // block_size) - reused)
    rate = reused / (reused + missed) if reused else 0.0
    return {
        **shared,
        "kv_cache_reused_block": _number(reused, np.int32),
        "kv_cache_missed_block": _number(missed, np.int32),
        "kv_cache_hit_rate": _number(rate, np.float32),
    }


def _number(value: float, dtype: DTypeLike) -> np.ndarray:
    return np.array([value], dtype)


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], dtype=object)
