"""Edits of logits against their definition, whatever tokens were sampled."""

from math import inf

from fixtures.engine.hashed import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.edits import (
    EDIT,
    EditContext,
    EditPlan,
    Edits,
    counts_tokens,
    needs_edits,
)
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

token_ids = st.integers(0, 9)
weights = st.floats(-2, 2, allow_nan=False)


def naive(sampling: SamplingParams, history: list[int], num_outputs: int) -> dict[int, float]:
    """Return the addend of every token's logit, computed from the whole history."""
    addends = {}
    for token_id in range(VOCAB_SIZE):
        addend = sum(weight for biased, weight in sampling.bias if biased == token_id)
        for word in sampling.bad_words:
            head = list(word[:-1])
            if word[-1] == token_id and history[len(history) - len(head) :] == head:
                addend = -inf
        too_short = num_outputs < sampling.min_tokens
        if too_short and token_id in (*sampling.end_ids, *sampling.stop_token_ids):
            addend = -inf
        addends[token_id] = addend
    return addends


@settings(max_examples=300, deadline=None)
@given(
    st.lists(token_ids, max_size=8),  # none: all of the prompt is virtual
    st.lists(token_ids, max_size=12),
    st.lists(st.tuples(token_ids, weights), max_size=4),
    st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=4),
    st.integers(0, 6),
)
def test_against_the_definition(
    prompt: list[int],
    output: list[int],
    bias: list[tuple[int, float]],
    bad_words: list[list[int]],
    min_tokens: int,
) -> None:
    sampling = SamplingParams(
        max_tokens=50,
        min_tokens=min_tokens,
        bias=tuple(bias),
        bad_words=tuple(map(tuple, bad_words)),
        end_ids=(11, 3),
        stop_token_ids=(12,),
    )
    edits = Edits(EditPlan(sampling, pack(prompt), EditContext(VOCAB_SIZE)))
    assert edits.needs_every_token == any(len(word) > 1 for word in bad_words)
    for number in range(len(output) + 1):
        history = prompt + output[:number]
        packed = list(EDIT.iter_unpack(edits.pack(output[:number])))
        drafted = edits.pack(output[: number // 2], output[number // 2 : number])
        assert list(EDIT.iter_unpack(drafted)) == packed, "drafts count as outputs"
        if not edits.needs_every_token:
            assert list(EDIT.iter_unpack(edits.pack_early(number))) == packed
        found = dict(packed)
        assert [token_id for token_id, _ in packed] == sorted(found), "by rising token id, once"
        for token_id, addend in naive(sampling, history, number).items():
            got = found.get(token_id, 0.0)
            assert got == addend == -inf or abs(got - addend) < 1e-6
        if found:
            assert needs_edits(sampling)


def test_no_effect_costs_nothing() -> None:
    assert not needs_edits(SamplingParams(max_tokens=5, end_ids=(1,), stop_words=(b"x",)))
    assert not needs_edits(SamplingParams(max_tokens=5, min_tokens=3))
    assert not needs_edits(SamplingParams(max_tokens=5, repetition_penalty=1.5))
    assert needs_edits(SamplingParams(max_tokens=5, min_tokens=3, end_ids=(1,)))


def test_penalties_count_tokens() -> None:
    assert not counts_tokens(SamplingParams(max_tokens=5, bias=((1, 2.0),)))
    assert counts_tokens(SamplingParams(max_tokens=5, repetition_penalty=0.5))
    assert counts_tokens(SamplingParams(max_tokens=5, presence_penalty=-0.5))
    assert counts_tokens(SamplingParams(max_tokens=5, frequency_penalty=0.1))
