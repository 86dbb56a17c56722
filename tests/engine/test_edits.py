"""Edits of logits against their definition, on whatever tokens were sampled."""

from math import inf

from engine.counting import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.edits import Edits, needs_edits
from slipstream_contract.sampling import SamplingParams

token_ids = st.integers(0, 9)
weights = st.floats(-2, 2, allow_nan=False)


def naive(
    sampling: SamplingParams, prompt: list[int], output: list[int]
) -> dict[int, tuple[float, float]]:
    """(factor, addend) of every token that has one, from the whole history."""
    history = prompt + output
    edits = {}
    for token_id in range(VOCAB_SIZE):
        factor = sampling.repetition_penalty if token_id in history else 1.0
        addend = sum(weight for biased, weight in sampling.bias if biased == token_id)
        if count := output.count(token_id):
            addend -= sampling.presence_penalty + sampling.frequency_penalty * count
        for word in sampling.bad_words:
            head = list(word[:-1])
            if word[-1] == token_id and history[len(history) - len(head) :] == head:
                addend = -inf
        too_short = len(output) < sampling.min_tokens
        if too_short and token_id in (*sampling.end_ids, *sampling.stop_token_ids):
            addend = -inf
        edits[token_id] = (factor, addend)
    return edits


@settings(max_examples=300, deadline=None)
@given(
    st.lists(token_ids, min_size=1, max_size=8),
    st.lists(token_ids, max_size=12),
    st.sampled_from([1.0, 1.3, 0.5]),
    st.sampled_from([0.0, 0.7, -0.2]),
    st.sampled_from([0.0, 0.25]),
    st.lists(st.tuples(token_ids, weights), max_size=4),
    st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=4),
    st.integers(0, 6),
)
def test_against_the_definition(
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: list[tuple[int, float]],
    bad_words: list[list[int]],
    min_tokens: int,
) -> None:
    sampling = SamplingParams(
        max_tokens=50,
        min_tokens=min_tokens,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias=tuple(bias),
        bad_words=tuple(map(tuple, bad_words)),
        end_ids=(11, 3),
        stop_token_ids=(12,),
    )
    edits = Edits(sampling, prompt)
    for number in range(len(output) + 1):
        packed = edits.pack(prompt + output[:number], number)
        found = {edit.token_id: (edit.factor, edit.addend) for edit in packed}
        assert len(found) == len(packed)
        for token_id, (factor, addend) in naive(sampling, prompt, output[:number]).items():
            got = found.get(token_id, (1.0, 0.0))
            if addend == -inf:
                assert got[1] == -inf
            else:
                assert got[0] == factor
                assert abs(got[1] - addend) < 1e-9
        if found:
            assert needs_edits(sampling)
        if number < len(output):
            edits.add(output[number])


def test_no_effect_costs_nothing() -> None:
    assert not needs_edits(SamplingParams(max_tokens=5, end_ids=(1,), stop_words=(b"x",)))
    assert not needs_edits(SamplingParams(max_tokens=5, min_tokens=3))
    assert needs_edits(SamplingParams(max_tokens=5, min_tokens=3, end_ids=(1,)))
