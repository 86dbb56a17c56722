"""Prompt lookup against its definition: what followed the last occurrence of the last tokens."""

from fixtures.engine.hashed import MAX_LEN
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.sequence import Request, Sequence
from slipstream.drafting.lookup import NGRAM, PromptLookup
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams


def sequence_of(prompt: list[int], number: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=MAX_LEN)
    request = Request(b"bridge", Submit(0, pack(prompt), sampling, 1))
    return Sequence(number, request, 0, pack(prompt), 1, 1000, None)


def defined(text: list[int], k: int) -> list[int]:
    """Search the text for its last tokens, from the end; copy what followed, token by token."""
    tail = text[-NGRAM:]
    for place in range(len(text) - 1, NGRAM - 1, -1):
        if text[place - NGRAM : place] == tail:
            grown = list(text)
            for i in range(k):
                grown.append(grown[place + i])
            return grown[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.integers(1, 8),
)
def test_drafts_are_what_followed_before(prompt: list[int], outputs: list[int], k: int) -> None:
    lookup, sequence = PromptLookup(), sequence_of(prompt)
    for token_id in outputs:
        sequence.outputs.append(token_id)
        text = [*prompt, *sequence.outputs]
        want = defined(text, k) if len(text) >= NGRAM else []
        assert lookup.propose(sequence, k).token_ids == want


def test_the_index_is_bounded() -> None:
    lookup = PromptLookup(max_tokens=20)
    first, second = sequence_of([1, 2, 3] * 5, 1), sequence_of([1, 2, 3] * 5, 2)
    assert lookup.propose(first, 4).token_ids
    assert lookup.propose(second, 4).token_ids == []
    lookup.release(first)
    assert lookup.propose(second, 4).token_ids == [1, 2, 3, 1]
