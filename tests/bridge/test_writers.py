"""Tokens to tensors: every wiring's responses, joined, are the one-shot decode."""

import json
from itertools import pairwise

import numpy as np
import pytest
from fixtures.bridge.texts import TEXT, text_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream import wire
from slipstream.bridge.composed import ComposedWriter, Vocabulary
from slipstream.bridge.fused import FusedWriter
from slipstream.bridge.pieces import merge
from slipstream.bridge.vllm import VllmWriter
from slipstream_contract.ids import pack
from slipstream_contract.request import GenerateRequest, ResponseOptions
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.schemas.trtllm import text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.stream_state import StreamState
from slipstream_postprocessing.detokenize import detokenize

PERF = wire.Perf(1, 2, 3, 4, 5, 6, 7)
VOCAB = Vocabulary(TEXT.vocab, TEXT.end_ids, skip_special=True)
REASON = wire.FinishReason.LENGTH
STATE = {"STREAM_STATE"}
IDS = {"output_ids", "sequence_length"} | STATE


class Slot:
    """A credit that always lets a stream send."""

    slot, next_number = 5, 77

    def enter(self, is_urgent): ...

    def leave(self): ...

    def spend(self, send): ...

    def release(self): ...


def cut(ids: list[int], places: list[int], drop_bytes: int = 0, index: int = 0):
    """Return tokens as an engine might send them: in pieces, the last with the end."""
    borders = sorted({0, len(ids), *(place % (len(ids) + 1) for place in places)})
    pieces = [ids[a:b] for a, b in pairwise(borders)] or [[]]
    told = [
        wire.Tokens(1, index, piece, [-0.5] * len(piece), values=values_of(piece))
        for piece in pieces[:-1]
    ]
    end = wire.Finished(REASON, 3, len(ids), PERF)
    log_probs, values = [-0.5] * len(pieces[-1]), values_of(pieces[-1])
    last = wire.Tokens(1, index, pieces[-1], log_probs, drop_bytes, end, values=values)
    return [*told, last]


def values_of(ids: list[int]) -> wire.Values:
    """Two likely tokens at each place: id 5, and id 6 that cannot come; its own is third."""
    count = len(ids)
    top_ids, top_values = np.array([[5, 6]] * count, "i"), np.array([[-0.25, -np.inf]] * count, "f")
    ranks, own = np.full(count, 3, "i"), np.full(count, -0.5, "f")
    columns = (x.tobytes() for x in (top_ids, top_values, ranks, own))
    return wire.Values(wire.Likely(count, 2, *columns) if count else None)


def token_request(ids: list[int], **options: bool) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=9)
    return GenerateRequest(prompt=pack(ids), sampling=sampling, options=ResponseOptions(**options))


texts = st.text(max_size=30) | st.lists(
    st.sampled_from(["é", "日本", "🙂", "a\u0301", " ", "\n", "def", "👩‍👩‍👧", "\x00", "ﬀ"])
).map("".join)
places = st.lists(st.integers(0, 200), max_size=12)


@settings(max_examples=300, deadline=None)
@given(texts, places, places)
def test_the_texts_of_a_stream_are_the_one_shot_decode(text, places, other_places):
    """Joined responses are the text however tokens come, and however many leave together."""
    ids = TEXT.encode(text) if text else []
    ids = [i for i in ids if i not in TEXT.vocab.special]
    tokens = cut(ids, places)
    request = token_request([1, 2], is_streaming=True, num_output_tokens=True)
    composed = ComposedWriter(request, VOCAB, IDS, None, None)
    asked = text_request(text_inputs(stream=True, return_num_output_tokens=True), {})
    fused = FusedWriter(TEXT.encode_request(asked), TEXT.detokenizer(), None, None)
    composed_text, fused_text = "", ""
    borders = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in other_places)})
    for begin, end in pairwise(borders):
        told = tokens[begin:end]
        count, is_last = sum(len(each.token_ids) for each in told), end == len(tokens)
        outputs = composed.write(told, is_last, None if is_last else Slot())
        state, token_ids = StreamState.unpack(outputs["STREAM_STATE"][0].tolist())
        assert state.is_last == is_last
        assert state.slot == (-1 if is_last else 5)
        assert is_last or state.number == 77
        assert outputs["sequence_length"].tolist() == [[count]]
        assert outputs["num_output_tokens"].tolist() == [[count]]
        assert outputs["output_ids"].tolist() == [[token_ids]]
        composed_text += detokenize(TEXT.vocab, token_ids, state)
        outputs = fused.write(told, is_last, None)
        assert outputs["num_output_tokens"].tolist() == [[count]]
        fused_text += outputs["text_output"].ravel()[0].decode()
    assert composed_text == fused_text == text


@settings(max_examples=100, deadline=None)
@given(texts.filter(bool), places, places)
def test_vllm_answers_all_sequences_in_every_response(text, places, other_places):
    ids = TEXT.encode(text)
    inputs = {"text_input": np.array([b"a"], dtype=object), "stream": np.array([True])}
    flags = ["finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens"]
    inputs |= {f"return_{name}": np.array([True]) for name in flags}
    parameters = {"n": 2, "max_tokens": 9}
    writer = VllmWriter(vllm_request(inputs, parameters), pack([1]), TEXT)
    told = [cut(ids, places), cut(ids, other_places, index=1)]
    joined, counts = ["", ""], [0, 0]
    while any(told):
        step = [each.pop(0) for each in told if each]
        outputs = writer.write(step, not any(told), None)
        for index in range(2):
            joined[index] += outputs["text_output"][index].decode()
            counts[index] += int(outputs["num_output_tokens"][index])
            log_probs = json.loads(outputs["logprobs"][index])
            assert len(log_probs) == outputs["num_output_tokens"][index]
            for each in log_probs:
                places = {int(i): (entry["rank"], entry["logprob"]) for i, entry in each.items()}
                own = next(iter(places))
                assert places == {own: (3, -0.5)} | {
                    i: place for i, place in {5: (1, -0.25), 6: (2, -9999.0)}.items() if i != own
                }
    assert joined == [text, text]
    assert counts == [len(ids), len(ids)]
    assert outputs["finish_reason"].tolist() == [b"length"] * 2
    assert outputs["cumulative_logprob"].tolist() == pytest.approx([-0.5 * len(ids)] * 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 500), min_size=1, max_size=20), places)
def test_pieces_that_are_merged_are_the_whole(ids, places):
    tokens = cut(ids, places, drop_bytes=2)
    piece = merge(tokens)
    assert piece.token_ids == ids
    assert len(piece.log_probs) == len(ids)
    assert piece.drop_bytes == 2
    assert piece.finished is not None


def test_the_prompt_comes_first_where_it_is_echoed():
    request = token_request([7, 8], echo=True)
    outputs = ComposedWriter(request, VOCAB, IDS, 3, 1).write(cut([9, 10], []), True, None)
    assert outputs["output_ids"].tolist() == [[[7, 8, 9, 10]]]
    assert outputs["sequence_length"].tolist() == [[4]]
    assert outputs["batch_index"].tolist() == [[3]]
    assert outputs["sequence_index"].tolist() == [[1]]
    state, token_ids = StreamState.unpack(outputs["STREAM_STATE"][0].tolist())
    assert state.slot == -1
    assert token_ids == [7, 8, 9, 10]


def test_a_cut_word_loses_its_bytes_in_both_wirings():
    ids = TEXT.encode("abc defg")
    request = token_request([1], is_streaming=True)
    tokens = cut(ids, [], drop_bytes=1)
    outputs = ComposedWriter(request, VOCAB, STATE, None, None).write(tokens, True, None)
    assert outputs.keys() == STATE  # nobody reads the ids twice
    state, token_ids = StreamState.unpack(outputs["STREAM_STATE"][0].tolist())
    assert detokenize(TEXT.vocab, token_ids, state) == "abc def"
    asked = TEXT.encode_request(text_request(text_inputs(stream=True), {}))
    fused = FusedWriter(asked, TEXT.detokenizer(), None, None)
    assert fused.write(tokens, True, None)["text_output"].ravel().tolist() == [b"abc def"]
