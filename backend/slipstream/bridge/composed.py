"""Serve model `tensorrt_llm`: token ids in, token ids out, alone or as a step of the ensemble."""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from slipstream_contract.errors import ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.trtllm import llm_request
from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import TokenBytes, state_after

from slipstream import wire
from slipstream.bridge.beams import ComposedBeams
from slipstream.bridge.bridge import Bridge, IncomingRequest, batch_size, row
from slipstream.bridge.pieces import Extras, merge
from slipstream.bridge.streams import Call, Credit, Outputs, Stream

_STATE, _OUTPUT_IDS, _LENGTH = "STREAM_STATE", "output_ids", "sequence_length"
_IDS = frozenset({_OUTPUT_IDS, _LENGTH})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bridge's knowledge of a checkpoint's tokenizer; `tokens` is None without one."""

    tokens: TokenBytes | None
    end_ids: tuple[int, ...]
    skip_special: bool  # as postprocessing does
    size: int | None = None  # of the model's; None: not known


class Composed:
    """The wiring of the real Triton ensemble.

    A request for `STREAM_STATE`, but not for every output, comes from the ensemble and gets flow
    control. A client that names no outputs requests all of them, and would not acknowledge
    anything.
    """

    def __init__(
        self,
        bridge: Bridge,
        vocab: Vocabulary,
        outputs: frozenset[str],
        exclude_input_by_default: bool,
        max_model_len: int | None = None,
    ) -> None:
        """Make the wiring; `outputs` are all that the model declares."""
        self._bridge = bridge
        self._vocab = vocab
        self._outputs = outputs
        self._exclude_input_by_default = exclude_input_by_default
        self._max_model_len = max_model_len

    def start(self, incoming: IncomingRequest) -> None:
        """Start a request. Raises ContractError."""
        if "stop" not in incoming.inputs:
            self._bridge.raise_if_full()
        size = batch_size(incoming.inputs)
        is_ensemble = _STATE in incoming.requested and incoming.requested != self._outputs
        parameters = dict(incoming.parameters)
        if is_ensemble:  # preprocessing, the step before, has honoured it
            parameters.pop("add_special_tokens", None)
        requests = [
            llm_request(
                row(incoming.inputs, index),
                parameters,
                self._vocab.tokens,
                self._exclude_input_by_default,
                self._vocab.end_ids,
                self._max_model_len,
                self._vocab.size,
            )
            for index in range(size)
        ]
        if any(request.is_stop for request in requests):
            if is_ensemble:
                raise ContractError(
                    "stop is no input of the ensemble: send it to tensorrt_llm, under the same id"
                )
            self._bridge.calls.stop(incoming.request_id)
            incoming.reply.send({}, is_final=True)
            return
        call = Call(incoming.reply, incoming.request_id, is_step=is_ensemble)
        submits = []
        for index, request in enumerate(requests):
            batch_index = index if size > 1 else None
            streams = self._streams(request, batch_index, incoming.requested)
            submits.append(self._bridge.submit(call, request, streams, incoming))
        self._bridge.start(call, submits, has_flow=is_ensemble)

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def _streams(
        self, request: GenerateRequest, batch_index: int | None, requested: Set[str]
    ) -> list[Stream]:
        is_streaming, streams = request.options.is_streaming, list[Stream]()
        if request.sampling.beams is not None:
            return [Stream(ComposedBeams(request, requested, batch_index), is_streaming)]
        for index in range(request.sampling.n):
            sequence_index = index if request.sampling.n > 1 else None
            writer = ComposedWriter(request, self._vocab, requested, batch_index, sequence_index)
            streams.append(Stream(writer, is_streaming))
        return streams


class ComposedWriter:
    """Responses of one sequence as token ids, with the state that postprocessing needs."""

    def __init__(
        self,
        request: GenerateRequest,
        vocab: Vocabulary,
        requested: Set[str],
        batch_index: int | None,
        sequence_index: int | None,
    ) -> None:
        self._prompt = request.token_ids.tolist() if request.options.echo else []
        self._vocab = vocab
        # The ensemble's postprocessing finds the ids in the state.
        self._has_ids = not requested.isdisjoint(_IDS)
        self._state = StreamState(number=1)
        self._extras = Extras(
            request.options,
            len(request.token_ids),
            batch_index,
            sequence_index,
            request.sampling.values,
        )

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the new tokens, after the prompt if it is to be echoed."""
        piece = merge(tokens)
        token_ids = self._prompt + piece.token_ids
        _, number, is_first, _, _, tail = self._state
        slot = -1
        if credit is not None:
            slot, number = credit.slot, credit.next_number
        state = StreamState(slot, number, is_first, is_last, piece.drop_bytes, tail)
        vocab = self._vocab
        if vocab.tokens is not None and not is_last:
            self._state = state_after(vocab.tokens, token_ids, state, vocab.skip_special)
        outputs = {_STATE: np.array([state.pack(token_ids)], np.int64), **self._extras.make(piece)}
        if self._has_ids:
            outputs[_OUTPUT_IDS] = np.array([[token_ids]], np.int32)
            outputs[_LENGTH] = np.array([[len(token_ids)]], np.int32)
        return outputs
