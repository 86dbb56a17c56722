"""No n-gram twice, against transformers: with drafts, forks and prompts read in parts."""

from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.ngrams import NoRepeat, PromptNgrams
from slipstream_contract.ids import pack
from slipstream_contract.limits import MAX_NGRAM
from transformers import NoRepeatNGramLogitsProcessor

VOCAB_SIZE = 4
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=14)
sizes = st.sampled_from([1, 2, 3, 4, 9])


def theirs(history: list[int], size: int) -> set[int]:
    processor = NoRepeatNGramLogitsProcessor(size)
    scores = processor(torch.tensor([history]), torch.zeros(1, VOCAB_SIZE))
    return {token_id for token_id in range(VOCAB_SIZE) if scores[0, token_id] == -inf}


@settings(max_examples=200, deadline=None)
@given(tokens.filter(bool), tokens, tokens, sizes, st.lists(st.integers(0, 14), max_size=3))
def test_bans_are_those_of_transformers(
    prompt: list[int], outputs: list[int], drafts: list[int], size: int, parts: list[int]
) -> None:
    ngrams = PromptNgrams(size, pack(prompt))
    for end in parts:
        ngrams.read(end)
    rule, sibling = NoRepeat(ngrams), NoRepeat(ngrams)
    assert set(sibling.addends(drafts, [])) == theirs(prompt + drafts, size)
    for number in range(len(outputs) + 1):
        known = outputs[:number]
        assert set(rule.addends(known, drafts)) == theirs(prompt + known + drafts, size)
        if number % 2:  # not at every one
            assert set(rule.addends(known, [])) == theirs(prompt + known, size)


@settings(max_examples=200, deadline=None)
@given(tokens.filter(bool), st.lists(tokens, max_size=5), sizes)
def test_a_fork_has_the_bans_of_its_own_outputs(
    prompt: list[int], histories: list[list[int]], size: int
) -> None:
    rule = NoRepeat(PromptNgrams(size, pack(prompt)))
    for outputs in histories:
        rule.fork()
        assert set(rule.addends(outputs, [])) == theirs(prompt + outputs, size)


@pytest.mark.parametrize("size", [2, MAX_NGRAM])
def test_a_step_of_a_long_text_reads_new_tokens_alone(size: int) -> None:
    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            part = super().__getitem__(key)
            Counted.num_read += len(part) if isinstance(part, list) else 1
            return part

    rule = NoRepeat(PromptNgrams(size, pack(range(9))))
    outputs = Counted(range(9, 3000))
    rule.addends(outputs, [])
    Counted.num_read = 0
    outputs.append(5)
    assert set(rule.addends(outputs, [])) == ({6} if size == 2 else set())
    assert Counted.num_read == 1
