"""Serve text models in the bridge itself: the ensemble's tensors without its two other steps."""

import numpy as np
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.trtllm import text_request

from slipstream import wire
from slipstream.bridge.beams import FusedBeams
from slipstream.bridge.bridge import Bridge, IncomingRequest, batch_size, row
from slipstream.bridge.pieces import Extras, merge
from slipstream.bridge.streams import Call, Credit, Outputs, Stream
from slipstream.bridge.text import Detokenizer, Text, is_short, make_encoders


class Fused:
    """The wiring of `tensorrt_llm_bls`, and of `ensemble` if configured so."""

    def __init__(self, bridge: Bridge, text: Text, exclude_input_by_default: bool) -> None:
        self._bridge = bridge
        self._text = text
        self._exclude_input_by_default = exclude_input_by_default
        self._encoders = make_encoders()

    def start(self, incoming: IncomingRequest) -> None:
        """Start a request, in another thread if its prompt is long. Raises ContractError."""
        self._text.check_sizes(incoming.inputs.get("text_input"))
        self._bridge.raise_if_full()
        requests = [
            text_request(
                row(incoming.inputs, index),
                incoming.parameters,
                self._exclude_input_by_default,
            )
            for index in range(batch_size(incoming.inputs))
        ]
        if is_short(text for each in requests for text in each.texts()):
            self._start(incoming, requests)
            return
        self._encoders.submit(
            self._bridge.answer, incoming.reply, lambda: self._start(incoming, requests)
        )

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown(cancel_futures=False)

    def _start(self, incoming: IncomingRequest, requests: list[GenerateRequest]) -> None:
        call = Call(incoming.reply, incoming.request_id)
        submits = []
        for index, request in enumerate(map(self._text.encode_request, requests)):
            batch_index = index if len(requests) > 1 else None
            streams = self._streams(request, batch_index)
            submits.append(self._bridge.submit(call, request, streams, incoming))
        self._bridge.start(call, submits)

    def _streams(self, request: GenerateRequest, batch_index: int | None) -> list[Stream]:
        is_streaming, n = request.options.is_streaming, request.sampling.n
        if request.sampling.beams is not None:
            return [Stream(FusedBeams(request, self._text, batch_index), is_streaming)]
        streams = []
        for index in range(n):
            sequence_index = index if n > 1 else None
            detokenizer = self._text.detokenizer()
            writer = FusedWriter(request, detokenizer, batch_index, sequence_index)
            streams.append(Stream(writer, is_streaming))
        return streams


class FusedWriter:
    """Responses of one sequence as text."""

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        batch_index: int | None,
        sequence_index: int | None,
    ) -> None:
        """Make a writer; `request` is encoded."""
        token_ids = request.token_ids
        self._prompt = token_ids.tolist() if request.options.echo else []
        self._detokenizer = detokenizer
        self._extras = Extras(
            request.options, len(token_ids), batch_index, sequence_index, request.sampling.values
        )

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the new text, after the prompt if it is to be echoed."""
        piece = merge(tokens)
        text = self._detokenizer.decode(self._prompt, piece, is_last)
        return {
            "text_output": np.array([text.encode()], dtype=object),
            **self._extras.make(piece),
        }
