"""The algorithm of a beam search beside transformers', over tiny models with random weights."""

import itertools
from collections.abc import Iterator
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.engine.beams import (
    MAX_CANDIDATES,
    Candidate,
    candidates,
    choose,
    num_candidates,
    score,
)
from slipstream_contract.beams import AT_WIDTH, NEVER, REACHABLE, Beams
from transformers import LlamaConfig, LlamaForCausalLM

_VOCAB, _NUM_CASES, _QUICK = 23, 500, 20
_STOPPING = {False: REACHABLE, True: AT_WIDTH, "never": NEVER}
_NEAR = 1e-4  # of log probs: which of two is better then depends on the order of additions


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run these tiny models in one thread, in which they are ten times as fast on a busy host."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval().float()


class _Search:
    """A search over a model, token by token, that also measures how near a choice was."""

    def __init__(self, model: LlamaForCausalLM, beams: Beams, end_ids: set[int]) -> None:
        self._model = model
        self._beams = beams
        self._end_ids = end_ids
        self.least_gap = 1.0

    def run(self, prompt: list[int], most: int) -> list[tuple[float, list[int]]]:
        beams, live, ended = self._beams, [([], 0.0)], []
        for length in itertools.count(1):
            tops = self._tops([prompt + tokens for tokens, _ in live])
            ordered = list(candidates(beams, [cum for _, cum in live], tops))
            self._measure([each.cum_log_prob for each in ordered[: 3 * beams.width + 1]])

            def is_end(each: Candidate, length: int = length) -> bool:
                return each.token_id in self._end_ids or length == most

            step = choose(beams, ordered, is_end, [each for each, _ in ended], length, most)
            for each in step.ended:
                tokens = [*live[each.beam][0], each.token_id]
                ended.append((score(beams, each.cum_log_prob, length), tokens))
            ended = sorted(ended, key=lambda pair: -pair[0])
            self._measure([value for value, _ in ended])
            del ended[beams.width :]
            if step.is_over:
                return ended
            if len(ended) == beams.width:
                best = score(beams, step.running[0].cum_log_prob, length)
                self._measure([best, ended[-1][0]])
            live = [([*live[c.beam][0], c.token_id], c.cum_log_prob) for c in step.running]
        raise AssertionError

    def _tops(self, texts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        with torch.inference_mode():
            logits = self._model(torch.tensor(texts)).logits[:, -1]
        found = logits.log_softmax(-1).sort(-1, descending=True)
        size = num_candidates(self._beams, len(self._end_ids))
        pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [(ids[:size], values[:size]) for ids, values in pairs]

    def _measure(self, values: list[float]) -> None:
        values = sorted(values)
        gaps = [abs(b - a) for a, b in itertools.pairwise(values)]
        self.least_gap = min([self.least_gap, *gaps])


def _case(seed: int) -> bool:
    """Compare one case; False: a choice was too near to tell."""
    draw = torch.Generator().manual_seed(seed)

    def pick(values: list[object]) -> object:
        return values[int(torch.randint(len(values), (1,), generator=draw))]

    width, most = pick([1, 2, 3, 4, 5, 8]), pick([1, 2, 5, 9, 14])
    stopping, penalty = pick(list(_STOPPING)), pick([0.0, 0.5, 1.0, 2.0, -0.7])
    end_ids = sorted(set(torch.randint(_VOCAB, (pick([1, 1, 2, 4]),), generator=draw).tolist()))
    prompt = torch.randint(_VOCAB, (pick([1, 3, 7]),), generator=draw).tolist()
    if width == 1:
        width = 2
    model = _model(seed)
    beams = Beams(width=width, length_penalty=penalty, early_stopping=_STOPPING[stopping])
    search = _Search(model, beams, set(end_ids))
    ours = search.run(prompt, most)
    if search.least_gap < _NEAR:
        return False
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=most,
        length_penalty=penalty,
        early_stopping=stopping,
        do_sample=False,
        eos_token_id=end_ids,
        pad_token_id=_VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for (value, tokens), row, other in zip(
        ours, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
    ):
        row = row[len(prompt) :]
        assert row[: len(tokens)] == tokens
        assert row[len(tokens) :] == [_VOCAB - 1] * (len(row) - len(tokens))
        assert value == pytest.approx(other, abs=1e-4, rel=1e-4)
    return True


def test_beams_are_those_of_transformers() -> None:
    assert sum(map(_case, range(_QUICK))) >= _QUICK // 2


@pytest.mark.rest
def test_beams_are_those_of_transformers_in_500_cases() -> None:
    num_compared = num_tried = 0
    while num_compared < _NUM_CASES:
        num_compared += _case(_QUICK + num_tried)
        num_tried += 1
    assert num_tried < 2 * _NUM_CASES, "too many ties to say much"


def test_diversity_prefers_other_parents() -> None:
    beams = Beams(width=2, diversity_rate=1.0)
    tops = [([5, 6], [-0.5, -0.6]), ([7, 8], [-0.5, -0.9])]
    ordered = list(candidates(beams, [-1.0, -1.5], tops))
    assert [(each.beam, each.token_id) for each in ordered] == [(1, 7), (1, 8), (0, 5), (0, 6)]
    assert ordered[0].cum_log_prob == -2.0  # what it is, not what it is ordered by


def test_candidates_suffice_for_width_to_go_on() -> None:
    assert num_candidates(Beams(width=4), 1) == 8
    assert num_candidates(Beams(width=4), 9) == 13
    assert num_candidates(Beams(width=32), 9) == MAX_CANDIDATES


_VALUES = st.lists(st.sampled_from([-0.25, -0.5, -1.0, -2.0, -inf]), max_size=6)


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, -1.5, -2.0]), _VALUES), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, -0.5]),
)
def test_candidates_are_all_in_order(
    asked: list[tuple[float, list[float]]], diversity_rate: float
) -> None:
    """Ties go to the better beam, then to the smaller id."""
    beams = Beams(width=2, diversity_rate=diversity_rate)
    tops = [(list(range(len(values))), sorted(values, reverse=True)) for _, values in asked]
    cums = [cum for cum, _ in asked]
    every = [
        (-(cums[beam] + value) - diversity_rate * beam, beam, token_id, value)
        for beam, (ids, values) in enumerate(tops)
        for token_id, value in zip(ids, values, strict=True)
        if value > -inf
    ]
    assert list(candidates(beams, cums, tops)) == [
        Candidate(beam, token_id, value, cums[beam] + value)
        for _, beam, token_id, value in sorted(every)
    ]


def test_what_cannot_be_sampled_is_no_candidate() -> None:
    tops = [([1, 2], [-0.1, float("-inf")])]
    assert [each.token_id for each in candidates(Beams(width=2), [0.0], tops)] == [1]
