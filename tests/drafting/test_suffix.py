"""Suffix drafts against their definition, a search of all texts for the longest end."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.sequence import Request, Sequence
from slipstream.drafting.corpus import NGRAM, Corpus, Text
from slipstream.drafting.longest import LongestMatch
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.suffix import SuffixDrafts
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

SAMPLING = SamplingParams(max_tokens=10**6)


def sequence_of(prompt: list[int], number: int = 0, salt: str = "") -> Sequence:
    request = Request(b"bridge", Submit(0, pack(prompt), SAMPLING, 1, cache_salt=salt))
    return Sequence(number, request, 0, pack(prompt), 1, 10**6, None)


def agree(text: list[int], other: list[int]) -> int:
    """Return how many last tokens two lists share."""
    length = 0
    while length < min(len(text), len(other)) and text[-1 - length] == other[-1 - length]:
        length += 1
    return length


def found(text: list[int], others: list[list[int]]) -> tuple[list[tuple[list[int], int]], int]:
    """Search `text`, then `others` from the last, each from its end; return the longest matches."""
    places = [(text, end) for end in range(len(text) - 1, 0, -1)]
    places += [(other, end) for other in reversed(others) for end in range(len(other) - 1, 0, -1)]
    lengths = [agree(text, other[:end]) for other, end in places]
    longest = max(lengths, default=0)
    return [p for p, length in zip(places, lengths, strict=True) if length == longest], longest


def defined(text: list[int], others: list[list[int]], k: int) -> tuple[list[int], list[float]]:
    """Let the longest matches vote, token by token."""
    matches, longest = found(text, others)
    if longest < NGRAM:
        return [], []
    drafts, chances = [], []
    for _ in range(min(k, longest)):
        said = []
        for other, end in matches:
            whole = [*text, *drafts] if other is text else other
            says = whole[end : end + len(drafts) + 1]
            if len(says) > len(drafts) and says[:-1] == drafts:
                said.append(says[-1])
        if not said:
            break
        best = max(said, key=said.count)  # the first of equals
        chances.append(said.count(best) / len(said))
        drafts.append(best)
    return drafts, chances


texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(texts, texts, st.lists(texts, max_size=3), st.integers(1, 8), st.integers(1, 3))
def test_drafts_are_what_followed_the_longest_end(prompt, outputs, ended, k, pace) -> None:
    suffix = SuffixDrafts(most=10**6)
    for number, text in enumerate(ended, start=1):
        before = sequence_of([9], number)
        before.outputs += text
        suffix.propose(before, 1)
        suffix.release(before)
    others = [text for text in ended if len(text) > NGRAM]
    sequence = sequence_of(prompt)
    for place in range(0, len(outputs), pace):
        sequence.outputs += outputs[place : place + pace]
        got = suffix.propose(sequence, k)
        want = defined([*prompt, *sequence.outputs], others, k)
        assert (got.token_ids, got.chances or []) == want


def test_a_vote_splits() -> None:
    suffix = SuffixDrafts()
    for number, after in enumerate(([7, 8], [7, 9], [6, 9]), start=1):
        before = sequence_of([1], number)
        before.outputs += [1, 2, 3, 4, *after]
        suffix.propose(before, 1)
        suffix.release(before)
    sequence = sequence_of([5, 1, 2, 3])
    sequence.outputs.append(4)
    got = suffix.propose(sequence, 8)
    assert got.token_ids == [7, 9]  # of [7, 8] and [7, 9] the last
    assert got.chances == [2 / 3, 1 / 2]


def test_the_longer_the_end_the_more_it_says() -> None:
    suffix = SuffixDrafts()
    text = list(range(40))
    before = sequence_of([1], 1)
    before.outputs += text
    suffix.propose(before, 1)
    suffix.release(before)
    sequence = sequence_of([99, *text[5:7]])
    sequence.outputs.append(7)
    assert suffix.propose(sequence, 8).token_ids == text[8:11]
    sequence.outputs += [8, 9]
    assert suffix.propose(sequence, 8).token_ids == text[10:15]


def test_tenants_do_not_see_each_other() -> None:
    suffix = SuffixDrafts()
    before = sequence_of([1], 1, salt="a")
    before.outputs += range(40)
    suffix.propose(before, 1)
    suffix.release(before)
    for number, salt, is_seen in ((2, "b", False), (3, "", False), (4, "a", True)):
        sequence = sequence_of([3, 4], number, salt)
        sequence.outputs.append(5)
        assert bool(suffix.propose(sequence, 4).token_ids) == is_seen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(30, 300))
def test_what_is_held_is_bounded(seed: int, max_tokens: int) -> None:
    """Whatever comes and ends; at the end nothing is left, and each draft followed somewhere."""
    rng, suffix = Random(seed), SuffixDrafts(max_tokens)
    suffix._paid = 0  # so that indexing and removing lag behind
    running: dict[int, Sequence] = {}
    said: dict[str, list[list[int]]] = {"": [], "a": []}
    for number in range(60):
        salt = rng.choice(["", "a"])
        running[number] = sequence_of([rng.randrange(3)] * rng.randint(1, 90), number, salt)
        for sequence in list(running.values()):
            sequence.outputs += rng.choices(range(3), k=rng.randint(1, 9))
            got = suffix.propose(sequence, 4).token_ids
            assert suffix.num_tokens <= max_tokens
            if got:
                own = list(sequence.ids(0, sequence.num_known))
                texts = [own, *said[sequence.request.message.cache_salt]]
                tail = [*own[-NGRAM:], got[0]]
                assert any(tail == t[i : i + 4] for t in texts for i in range(len(t)))
        if len(running) > 4:
            ended = running.pop(rng.choice(list(running)))
            said[ended.request.message.cache_salt].append(list(ended.outputs))
            suffix.release(ended)
            assert suffix.num_tokens <= max_tokens
    for sequence in running.values():
        suffix.release(sequence)
    held = sum(len(text.token_ids) for _, text in suffix._ended)
    assert held == suffix.num_tokens
    num_runs = sum(corpus.num_runs for corpus in suffix._corpora.values())
    assert num_runs <= suffix.num_tokens
    suffix._max_tokens, suffix._paid = 0, 10**6
    assert not suffix._has_room(1)
    assert suffix.num_tokens == 0
    assert not suffix._corpora


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_of_a_removed_text(seed: int) -> None:
    rng, corpus, held = Random(seed), Corpus(), []
    for number in range(12):
        text = Text(number, array("i", rng.choices(range(3), k=rng.randint(1, 40))))
        corpus.index(text, len(text.token_ids))
        held.append(text)
        if len(held) > 4:
            while held[0].token_ids:
                assert corpus.remove(held[0], 7) <= 7
                runs = {t.key(p) for t in held for p in range(NGRAM, len(t.token_ids) + 1)}
                assert set(corpus._last) <= runs
                for run in runs:
                    for other, place in corpus.occurrences(corpus.last(run), 99):
                        assert other.key(place) == run
            held.pop(0)
    for text in held:
        corpus.remove(text, 99)
    assert corpus.num_runs == 0
    assert not corpus


def test_a_long_prompt_is_indexed_piece_by_piece() -> None:
    suffix = SuffixDrafts()
    text = list(range(10_000))
    sequence = sequence_of([*text, 5, 6])
    sequence.outputs.append(7)
    calls = 0
    while not suffix.propose(sequence, 4).token_ids:
        calls += 1
    assert 50 < calls < 120  # 4,096 tokens at once, then 64 each


@settings(max_examples=60, deadline=None)
@given(texts, texts, texts, st.integers(1, 8))
def test_auto_is_what_follows_the_longer_match(prompt, outputs, ended, k) -> None:
    auto = LongestMatch(PromptLookup(), SuffixDrafts(most=10**6))
    lookup, suffix = PromptLookup(), SuffixDrafts(most=10**6)
    before = sequence_of([9], 1)
    before.outputs += ended
    for drafter in (auto, suffix):
        drafter.propose(before, 1)
        drafter.release(before)
    others = [ended] if len(ended) > NGRAM else []
    sequence = sequence_of(prompt)
    for token_id in outputs:
        sequence.outputs.append(token_id)
        text = [*prompt, *sequence.outputs]
        last, longest = lookup.propose(sequence, k), suffix.propose(sequence, k)
        ends = [end for end in range(NGRAM, len(text)) if text[end - NGRAM : end] == text[-NGRAM:]]
        length = agree(text, text[: ends[-1]]) if ends else 0
        want = last if length >= max(NGRAM, found(text, others)[1]) else longest
        assert auto.propose(sequence, k) == want
