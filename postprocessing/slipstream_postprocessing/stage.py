"""The Triton side of postprocessing: token ids in, text out."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from slipstream_contract import limits
from slipstream_contract.errors import Code, ContractError, clip
from slipstream_contract.parameters import StageParameters
from slipstream_contract.stream_state import StreamState, has_beams, unpack_beams
from slipstream_contract.vocab import TokenBytes
from slipstream_runtime.credit import NUM_SLOTS, CreditFile, Taker
from slipstream_runtime.directory import hide_shared_memory, open_runtime
from slipstream_runtime.stub import close_inherited, quicken_bytes, rest_collector
from slipstream_runtime.vitals import Vitals
from slipstream_runtime.waking import wake_gently

from slipstream_postprocessing.detokenize import check_ids, detokenize, detokenize_batch

log = logging.getLogger(__name__)

_STATE = "STREAM_STATE"
# Querying for a cancel is a round trip to the server. Every third response of a stream does so, not
# sooner after the last query than the first of these times, and any response after the second.
# `tensorrt_llm` queries before a stream starts.
_CHECK_EVERY, _MIN_CHECK_NS, _MAX_CHECK_NS = 3, 30_000_000, 120_000_000


_Part = tuple[StreamState, Sequence[int]]  # of one text


class _Responses(list[Any]):
    """The responses of one call. When the list is deleted, its streams get their credits back.

    The Python backend's stub deletes it once the server has sent everything: until then this
    process owns the memory of the responses. So the next response of a stream never overtakes this
    one, even through another process.
    """

    def __init__(self, taker: Taker) -> None:
        super().__init__()
        self.taken: list[tuple[int, int]] = []  # slot and number
        self._taker = taker
        taker.start()

    def __del__(self) -> None:
        for slot, number in self.taken:
            self._taker.acknowledge(slot, number)
        self._taker.finish()


class TritonPythonModel:
    """Model `postprocessing`. Stateless: a stream's state travels with each response."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the vocabulary and map the credit file. Raises OSError or ValueError."""
        hide_shared_memory()
        close_inherited()
        wake_gently()
        quicken_bytes(pb)
        parameters = StageParameters(args)
        self._vocab = TokenBytes.load(parameters.tokenizer_directory())
        self._skip_special = parameters.flag("skip_special_tokens", True)
        # With dynamic batching the server itself drops requests of disconnected clients.
        self._checks_cancel = not parameters.has_dynamic_batching
        runtime = open_runtime(os.getppid(), parameters.engine_model)
        self._credits = CreditFile(runtime.credits)
        self._taker = Taker(self._credits)
        self._vitals = Vitals(runtime.vitals(parameters.model, os.getpid()))
        rest_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response per request, in order."""
        responses = _Responses(self._taker)
        for request in requests:
            responses.append(self._respond(request, responses.taken))
        return responses

    def finalize(self) -> None:
        """Stop the heartbeats and unmap the credit file."""
        self._vitals.close()
        self._taker.close()
        self._credits.close()

    def _respond(self, request: Any, taken: list[tuple[int, int]]) -> Any:
        """Return the text of one request, or its error. Either returns the stream's credit."""
        state = None
        self._vitals.start()
        try:
            inputs = {tensor.name(): tensor for tensor in request.inputs()}
            if _STATE in inputs:
                state, beams = self._streamed(inputs)
                if state.slot >= 0 and self._checks_cancel and self._is_cancelled(request, state):
                    self._credits.mark_cancelled(state.slot, state.number)
                texts = [self._text_of(*beam) for beam in beams]
            else:
                rows = _input(inputs, "TOKENS_BATCH"), _input(inputs, "SEQUENCE_LENGTH")
                texts = detokenize_batch(self._vocab, *rows, self._skip_special)
            output = np.array([text.encode() for text in texts], dtype=object)
            return pb.InferenceResponse([pb.Tensor("OUTPUT", output)])
        except ContractError as error:
            return _failed(error)
        except Exception:
            log.exception("postprocessing failed")
            return _failed(ContractError("postprocessing failed", Code.INTERNAL))
        finally:
            if state and state.slot >= 0:
                taken.append((state.slot, state.number))
            self._vitals.finish()

    def _is_cancelled(self, request: Any, state: StreamState) -> bool:
        """Return whether the client has disconnected; False when it is not time to query."""
        now_ns = time.monotonic_ns()
        number, checked_ns = self._credits.last_check(state.slot)
        is_soon = state.number - number < _CHECK_EVERY
        if now_ns - checked_ns < (_MAX_CHECK_NS if is_soon else _MIN_CHECK_NS):
            return False
        self._credits.note_check(state.slot, state.number, now_ns)
        return bool(request.is_cancelled())

    def _text_of(self, state: StreamState, token_ids: Sequence[int]) -> str:
        check_ids(_STATE, token_ids)
        return detokenize(self._vocab, token_ids, state, self._skip_special)

    def _streamed(self, inputs: Mapping[str, Any]) -> tuple[StreamState, list[_Part]]:
        """Return the state of a streamed response, and what to make text of.

        Raises ContractError if no such response was sent.
        """
        state, parts = _read_state(inputs)
        if state.slot >= 0 and not self._credits.is_expected(state.slot, state.number):
            raise ContractError(
                f"{_STATE} is malformed: slot {state.slot} has no response {state.number}"
            )
        return state, parts


def _read_state(inputs: Mapping[str, Any]) -> tuple[StreamState, list[_Part]]:
    """Return the state, and a state and tokens for each text: one, or one a beam."""
    others = inputs.keys() - {_STATE}
    if others:
        raise ContractError(f"{_STATE} contains its tokens: leave out {min(others)}")
    rows = inputs[_STATE].as_numpy()
    limits.check_count(_STATE, rows.size, limits.MAX_DETOKENIZED, "integers")
    values = rows.tolist()
    try:
        [row] = values
        state, parts = _unpack(row)
    except (ValueError, OverflowError):
        raise ContractError(f"{_STATE} is malformed: {clip(values)}") from None
    if not -1 <= state.slot < NUM_SLOTS or state.drop_bytes < 0:
        raise ContractError(f"{_STATE} is malformed: {clip(values)}")
    return state, parts


def _unpack(row: Sequence[int]) -> tuple[StreamState, list[_Part]]:
    if not has_beams(row):
        state, token_ids = StreamState.unpack(row)
        return state, [(state, token_ids)]
    slot, number, beams = unpack_beams(row)
    parts = [
        (StreamState(is_last=is_last, drop_bytes=drop_bytes), token_ids)
        for token_ids, drop_bytes, is_last in beams
    ]
    return StreamState(slot, number), parts


def _input(inputs: Mapping[str, Any], name: str) -> Any:
    if name not in inputs:
        raise ContractError(f"{name} is missing")
    return inputs[name].as_numpy()


def _failed(error: ContractError) -> Any:
    name = "INVALID_ARG" if error.code is Code.INVALID_ARGUMENT else error.code.value
    return pb.InferenceResponse(error=pb.TritonError(str(error), getattr(pb.TritonError, name)))
