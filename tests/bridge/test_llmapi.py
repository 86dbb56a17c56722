"""The LLM-API model's wiring: whole texts so far, one end, and `stop` by the request's id."""

import dataclasses
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from fixtures.bridge.texts import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream import wire
from slipstream.bridge.bridge import IncomingRequest
from slipstream.bridge.llmapi import LlmApi, LlmApiWriter
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.request import GenerateRequest, ResponseOptions
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.tensors import LLMAPI
from slipstream_postprocessing.detokenize import detokenize

PERF = wire.Perf(1, 2, 3, 4, 5, 1, 6)
ALL = ResponseOptions(
    is_streaming=True,
    echo=True,
    finish_reason=True,
    stop_reason=True,
    cumulative_log_prob=True,
    perf_metrics=True,
)


def writer(options: ResponseOptions = ALL, n: int = 1) -> LlmApiWriter:
    sampling = SamplingParams(max_tokens=9)
    request = GenerateRequest(prompt="the prompt ", sampling=sampling, options=options)
    return LlmApiWriter(request, n, TEXT, block_size=32)


def ended(ids: list[int], reason: wire.FinishReason, index: int = 0) -> wire.Tokens:
    stop_reason = "end" if reason is wire.FinishReason.STOP else None
    finished = wire.Finished(reason, 70, len(ids), PERF, stop_reason)
    return wire.Tokens(1, index, ids, [-0.5] * len(ids), 0, finished)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=20), st.integers(1, 5))
def test_every_response_has_the_text_so_far_and_the_last_the_one_shot_decode(text, size) -> None:
    ids = [i for i in TEXT.encode(text) if i not in TEXT.vocab.special]
    made, responses = writer(), []
    for start in range(0, len(ids), size):
        piece = wire.Tokens(1, 0, ids[start : start + size], [-0.5] * len(ids[start:][:size]))
        responses.append(made.write([piece], False, None))
    responses.append(made.write([ended([], wire.FinishReason.LENGTH)], True, None))
    texts = [response["text_output"][0].decode() for response in responses]
    assert texts[-1] == "the prompt " + detokenize(TEXT.vocab, ids)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    reasons = [response["finish_reason"].tolist() for response in responses]
    assert reasons == [[b"None"]] * (len(responses) - 1) + [[b"length"]]
    sums = [float(response["cumulative_logprob"][0]) for response in responses]
    assert sums[-1] == -0.5 * len(ids)
    assert ["arrival_time_ns" in response for response in responses] == [False] * (
        len(responses) - 1
    ) + [True]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (wire.FinishReason.END, (b"stop", b"None")),
        (wire.FinishReason.STOP, (b"stop", b"end")),
        (wire.FinishReason.LENGTH, (b"length", b"None")),
        (wire.FinishReason.CANCELLED, (b"cancelled", b"None")),
    ],
)
def test_the_end_has_the_declared_types_and_shapes(reason, said) -> None:
    outputs = writer().write([ended([5, 6], reason)], True, None)
    assert (outputs["finish_reason"][0], outputs["stop_reason"][0]) == said
    assert {tensor.name for tensor in LLMAPI.outputs} == outputs.keys()
    kinds = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64, "STRING": np.object_}
    for name, array in outputs.items():
        assert array.shape == (1,)
        assert array.dtype == kinds[LLMAPI.output(name).dtype], name
    # A prompt of 70 tokens has 3 blocks, of which one was in the cache.
    assert outputs["kv_cache_reused_block"] == [1]
    assert outputs["kv_cache_missed_block"] == [2]
    assert outputs["kv_cache_hit_rate"] == np.float32(1 / 3)


def test_several_sequences_share_a_response() -> None:
    made = writer(msgspec.structs.replace(ALL, echo=False, perf_metrics=False), n=2)
    first = made.write([ended(TEXT.encode("a"), wire.FinishReason.END, 1)], False, None)
    assert first["text_output"].tolist() == [b"", b"a"]
    assert first["finish_reason"].tolist() == [b"None", b"stop"]


class Desk:
    """A bridge that notes what is stopped and submitted."""

    def __init__(self) -> None:
        self.calls, self.stopped, self.num_submitted = self, [], 0

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)

    def raise_if_full(self) -> None: ...

    def submit(self, call, request, streams, incoming):
        self.num_submitted += 1

    def start(self, call, submits) -> None: ...


def incoming(request_id: str, parameters=(), **flags: bool) -> IncomingRequest:
    inputs = {"text_input": np.array([b""], object)}
    inputs |= {name: np.array([value]) for name, value in flags.items()}
    return IncomingRequest(inputs, dict(parameters), request_id, None, frozenset(), 0)


def test_a_stop_is_answered_as_cancelled_whether_or_not_the_request_runs() -> None:
    desk = Desk()
    wiring = LlmApi(desk, TEXT, False, 32)
    with pytest.raises(ContractError, match="request '7' is cancelled") as caught:
        wiring.start(incoming("7", {"Streaming": False}, stop=True))
    assert caught.value.code is Code.CANCELLED
    with pytest.raises(ContractError, match="stop is true, but the request has no id"):
        wiring.start(incoming("", stop=True))
    assert (desk.stopped, desk.num_submitted) == (["7"], 0)
    wiring.close()


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_only_a_decoupled_model_streams(is_decoupled) -> None:
    desk = Desk()
    wiring = LlmApi(desk, TEXT, is_decoupled, 32)
    asked = incoming("", streaming=True)
    asked = dataclasses.replace(
        asked, inputs=asked.inputs | {"text_input": np.array([b"a"], object)}
    )
    if is_decoupled:
        wiring.start(asked)
    else:
        with pytest.raises(ContractError, match=r"streaming is true.*llmapi,decoupled"):
            wiring.start(asked)
    assert desk.num_submitted == is_decoupled
    wiring.close()
