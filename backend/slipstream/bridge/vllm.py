"""Serve model `vllm_model`: the tensors and behaviours of Triton's vLLM backend.

One response holds all sequences of a prompt: text, reason and counts are arrays with one entry for
each.
"""

import numpy as np
from slipstream_contract.ids import TokenIds
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.whole import RUNNING

from slipstream import wire
from slipstream.bridge.beams import VllmBeams
from slipstream.bridge.bridge import Bridge, IncomingRequest
from slipstream.bridge.log_probs import LogProbTexts, sum_of
from slipstream.bridge.pieces import Piece, merge
from slipstream.bridge.streams import Call, Credit, Outputs, Stream
from slipstream.bridge.text import Text, is_short, make_encoders

_REASONS = {
    wire.FinishReason.END: "stop",
    wire.FinishReason.STOP: "stop",
    wire.FinishReason.LENGTH: "length",
    wire.FinishReason.CANCELLED: "abort",
}


class Vllm:
    """The wiring of `vllm_model`."""

    def __init__(self, bridge: Bridge, text: Text) -> None:
        self._bridge = bridge
        self._text = text
        self._encoders = make_encoders()

    def start(self, incoming: IncomingRequest) -> None:
        """Start a request, in another thread if its prompt is long. Raises ContractError."""
        self._text.check_sizes(incoming.inputs.get("text_input"))
        self._bridge.raise_if_full()
        request = vllm_request(incoming.inputs, incoming.parameters)
        if is_short(request.texts()):
            self._start(incoming, request)
            return
        self._encoders.submit(
            self._bridge.answer, incoming.reply, lambda: self._start(incoming, request)
        )

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown(cancel_futures=False)

    def _start(self, incoming: IncomingRequest, request: GenerateRequest) -> None:
        encoded = self._text.encode_request(request)
        call = Call(incoming.reply, incoming.request_id)
        n, num_input = encoded.sampling.n, len(encoded.token_ids)
        is_streaming = request.options.is_streaming
        if encoded.sampling.beams is not None:
            streams = [Stream(VllmBeams(request, num_input, self._text), is_streaming)]
        else:
            writer = VllmWriter(request, encoded.token_ids, self._text)
            streams = [Stream(writer, is_streaming, n)] * n
        submit = self._bridge.submit(call, encoded, streams, incoming)
        self._bridge.start(call, [submit])


class _Sequence:
    """The state of one of the n sequences."""

    def __init__(self, text: Text, skip_special: bool | None) -> None:
        self.cum_log_prob = 0.0
        self.reason = RUNNING
        self._detokenizer = text.detokenizer(skip_special)

    def decode(self, piece: Piece) -> str:
        """Return the new text, which may be empty."""
        is_ended = self.reason != RUNNING
        if piece.finished is not None:
            self.reason = _REASONS[piece.finished.reason]
        self.cum_log_prob += sum_of(piece)
        return "" if is_ended else self._detokenizer.decode([], piece, piece.finished is not None)


class VllmWriter:
    """Responses of all sequences of one prompt."""

    def __init__(self, request: GenerateRequest, token_ids: TokenIds, text: Text) -> None:
        """Make a writer; `token_ids` are the prompt's."""
        self._options = request.options
        self._num_input_tokens = len(token_ids)
        skip_special, n = request.options.skip_special_tokens, request.sampling.n
        self._sequences = [_Sequence(text, skip_special) for _ in range(n)]
        self._prompt = request.text if request.options.echo else ""
        wanted = request.sampling.values or LogProbs()
        self._log_probs = LogProbTexts(wanted, text.vocab, token_ids)

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return what is new of every sequence, after the prompt if it is to be echoed."""
        options, sequences = self._options, self._sequences
        pieces = [
            merge([each for each in tokens if each.index == index])
            for index in range(len(sequences))
        ]
        pairs = list(zip(sequences, pieces, strict=True))
        texts = [self._prompt + sequence.decode(piece) for sequence, piece in pairs]
        outputs = {"text_output": _strings(texts)}
        if options.finish_reason:
            outputs["finish_reason"] = _strings([sequence.reason for sequence in sequences])
        if options.cumulative_log_prob:
            sums = [sequence.cum_log_prob for sequence in sequences]
            outputs["cumulative_logprob"] = np.array(sums, np.float32)
        if options.log_probs:
            logs = [self._log_probs.outputs(piece) for piece in pieces]
            outputs["logprobs"] = np.array(logs, dtype=object)
        if (prompt := self._log_probs.prompt(pieces[0])) is not None:
            outputs["prompt_logprobs"] = np.array([prompt], dtype=object)
        if options.num_input_tokens:
            outputs["num_input_tokens"] = np.array([self._num_input_tokens], np.uint32)
        if options.num_output_tokens:
            counts = [len(piece.token_ids) for piece in pieces]
            outputs["num_output_tokens"] = np.array(counts, np.uint32)
        return outputs


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], dtype=object)
