"""Make the responses of a beam search: whole beams, the best first, as they stand.

A later response may have other beams in the place of earlier ones, so each holds everything: the
texts or token ids of all beams that are wanted for. The text of a beam that goes on ends before an
incomplete character.
"""

from collections.abc import Sequence, Set

import msgspec
import numpy as np
from slipstream_contract.request import GenerateRequest, ResponseOptions
from slipstream_contract.stream_state import BeamState, pack_beams
from slipstream_contract.whole import RUNNING

from slipstream import wire
from slipstream.bridge.pieces import perf_outputs
from slipstream.bridge.streams import Credit, Outputs
from slipstream.bridge.text import Text

_STATE, _OUTPUT_IDS, _LENGTH = "STREAM_STATE", "output_ids", "sequence_length"


def latest(tokens: Sequence[wire.Tokens]) -> tuple[list[wire.Beam], wire.Finished | None]:
    """Return the beams of the last of some messages, and the end if it has come."""
    last = tokens[-1]
    return last.beams or [], last.finished


def padded(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    """Return rows of different lengths as an array, filled up with zeros."""
    array = np.zeros((len(rows), max(map(len, rows), default=0)), dtype)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array


def text_of(text: Text, beam: wire.Beam, prompt: list[int], skip: bool | None = None) -> str:
    """Return the text of a beam, after the prompt's tokens."""
    is_last = beam.reason is not None
    return text.whole([*prompt, *beam.token_ids], beam.drop_bytes, is_last, skip)


class BeamExtras:
    """The optional outputs of TensorRT-LLM's tensors, for all beams of a response."""

    def __init__(self, options: ResponseOptions, num_input_tokens: int, batch_index: int | None):
        self._options = options
        self._num_input_tokens = num_input_tokens
        self._batch_index = batch_index

    def make(self, beams: Sequence[wire.Beam], finished: wire.Finished | None) -> Outputs:
        """Return the requested outputs; `num_output_tokens` counts all beams of the response."""
        options, outputs = self._options, dict[str, np.ndarray]()
        if self._batch_index is not None:
            outputs["batch_index"] = _scalar(self._batch_index)
        if options.log_probs:
            sums = [beam.cum_log_prob for beam in beams]
            outputs["cum_log_probs"] = np.array([sums], np.float32)
            outputs["output_log_probs"] = padded([b.log_probs for b in beams], np.float32)[None]
        if options.num_input_tokens:
            outputs["num_input_tokens"] = _scalar(self._num_input_tokens)
        if options.num_output_tokens:
            outputs["num_output_tokens"] = _scalar(sum(len(beam.token_ids) for beam in beams))
        if options.perf_metrics and finished is not None:
            outputs |= perf_outputs(finished.perf)
        return outputs


class ComposedBeams:
    """Responses of `tensorrt_llm`: token ids, and what postprocessing needs to make text."""

    def __init__(
        self, request: GenerateRequest, requested: Set[str], batch_index: int | None
    ) -> None:
        self._prompt = request.token_ids.tolist() if request.options.echo else []
        self._has_ids = not requested.isdisjoint({_OUTPUT_IDS, _LENGTH})
        self._extras = BeamExtras(request.options, len(request.token_ids), batch_index)
        self._number = 0

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return all beams, after the prompt if it is to be echoed."""
        beams, finished = latest(tokens)
        self._number += 1
        slot, number = (-1, self._number) if credit is None else (credit.slot, credit.next_number)
        rows = [self._prompt + beam.token_ids for beam in beams]
        states = [
            BeamState(row, beam.drop_bytes, beam.reason is not None)
            for row, beam in zip(rows, beams, strict=True)
        ]
        packed = pack_beams(slot, number, states)
        outputs = {_STATE: np.array([packed], np.int64), **self._extras.make(beams, finished)}
        if self._has_ids:
            outputs[_OUTPUT_IDS] = padded(rows, np.int32)[None]
            outputs[_LENGTH] = np.array([[len(row) for row in rows]], np.int32)
        return outputs


class FusedBeams:
    """Responses of `tensorrt_llm_bls`, and of `ensemble` where the bridge serves it."""

    def __init__(self, request: GenerateRequest, text: Text, batch_index: int | None) -> None:
        """Make a writer; `request` is encoded."""
        self._prompt = request.token_ids.tolist() if request.options.echo else []
        self._text = text
        self._extras = BeamExtras(request.options, len(request.token_ids), batch_index)

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the text of every beam, after the prompt if it is to be echoed."""
        beams, finished = latest(tokens)
        texts = [text_of(self._text, beam, self._prompt) for beam in beams]
        return {"text_output": _strings(texts), **self._extras.make(beams, finished)}


class VllmBeams:
    """Responses of `vllm_model`."""

    def __init__(self, request: GenerateRequest, num_input_tokens: int, text: Text) -> None:
        self._options = request.options
        self._num_input_tokens = num_input_tokens
        self._prompt = request.text if request.options.echo else ""
        self._text = text

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the whole text of every beam, after the prompt if it is to be echoed."""
        beams, _ = latest(tokens)
        options, skip = self._options, self._options.skip_special_tokens
        texts = [self._prompt + text_of(self._text, beam, [], skip) for beam in beams]
        outputs = {"text_output": _strings(texts)}
        if options.finish_reason:
            outputs["finish_reason"] = _strings([reason_of(beam) for beam in beams])
        if options.cumulative_log_prob:
            sums = [beam.cum_log_prob for beam in beams]
            outputs["cumulative_logprob"] = np.array(sums, np.float32)
        if options.log_probs:
            outputs["logprobs"] = np.array(list(map(self._log_probs, beams)), dtype=object)
        if options.num_input_tokens:
            outputs["num_input_tokens"] = np.array([self._num_input_tokens], np.uint32)
        if options.num_output_tokens:
            counts = [len(beam.token_ids) for beam in beams]
            outputs["num_output_tokens"] = np.array(counts, np.uint32)
        return outputs

    def _log_probs(self, beam: wire.Beam) -> bytes:
        raw = self._text.vocab.raw
        entries = [
            {
                str(token_id): {
                    "logprob": log_prob,
                    "rank": None,
                    "decoded_token": raw(token_id).decode(errors="replace"),
                }
            }
            for token_id, log_prob in zip(beam.token_ids, beam.log_probs, strict=True)
        ]
        return msgspec.json.encode(entries)


_REASONS = {
    wire.FinishReason.END: "stop",
    wire.FinishReason.STOP: "stop",
    wire.FinishReason.LENGTH: "length",
    wire.FinishReason.CANCELLED: "abort",
}


def reason_of(beam: wire.Beam) -> str:
    """Return how a beam ended, in vLLM's words."""
    return RUNNING if beam.reason is None else _REASONS.get(beam.reason, "abort")


def _scalar(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([text.encode() for text in texts], dtype=object)
