"""The engine under all that `Machine` does to it, with guides whose masks are late or slow.

No thread makes masks here: the machine says when they come, so that each run can be repeated.
"""

import time
from collections.abc import Iterator
from math import inf

import pytest
from fixtures.engine.drafting import RandomDrafts
from fixtures.engine.hashed import VOCAB_SIZE, Words, banned_after, next_token
from fixtures.engine.machine import MAX_MODEL_LEN, Machine, prompts
from fixtures.engine.values import WANTED
from fixtures.guide.real import guide
from fixtures.guide.toy import END, ToyCompiler, legal_after, may_end
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from slipstream.core.sequence import Sequence, mix_seed
from slipstream.guide import workers as workers_module
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams

TEXTS = ("x", "y:9", "f", "fg:7", "breaks")


def next_of(prompt: list[int], taken: list[int], sampling: SamplingParams, seed: int) -> int | None:
    """Return the next sample by definition; None: no token is left."""
    assert sampling.guide is not None
    text, number, ends = sampling.guide.text, len(taken), {END, *sampling.end_ids}
    legal = {*legal_after(text, taken)} - ends | (ends if may_end(text, taken) else set())
    banned = banned_after([*prompt, *taken], number, sampling) | {*range(VOCAB_SIZE)} - legal
    banned |= {END} if number < sampling.min_tokens else set()
    if len(banned & {*range(VOCAB_SIZE)}) == VOCAB_SIZE:
        return None
    return next_token([*prompt, *taken], seed, number, banned)


def guided(
    prompt: list[int], sampling: SamplingParams, index: int
) -> tuple[list[int], FinishReason]:
    """Return tokens and ending by definition."""
    assert sampling.guide is not None
    seed = mix_seed(sampling.seed or 0, index) if sampling.temperature else 0
    taken: list[int] = []
    while True:
        token_id = next_of(prompt, taken, sampling, seed)
        if token_id is None:
            return taken, FinishReason.ERROR
        if token_id in {END, *sampling.end_ids}:
            return taken, FinishReason.END
        taken.append(token_id)
        if not legal_after(sampling.guide.text, taken):
            return taken, FinishReason.STOP
        if len(taken) == min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt)):
            return taken, FinishReason.LENGTH


class GuidedDrafts(RandomDrafts):
    """Drafts of guided sequences are what is forced, or what they will have, or wrong."""

    def propose(
        self, decodes: list[Sequence], max_drafts: int
    ) -> Iterator[tuple[Sequence, list[int]]]:
        for sequence, drafts in super().propose(decodes, max_drafts):
            if sequence.guide is None or self._random.random() >= self.right:
                yield sequence, drafts
                continue
            right = guided(sequence.prompt.tolist(), sequence.sampling, sequence.index)[0]
            later = right[sequence.num_outputs :]
            yield sequence, self._random.choice([sequence.guide.forced, later])[: len(drafts)]


class GuidedMachine(Machine):
    """Guided requests beside all others."""

    drafts_of = GuidedDrafts

    def __init__(self) -> None:
        super().__init__()
        self.guide_compiler = ToyCompiler({}, {})
        workers_module._FAST_S = inf

    def begun(self) -> None:
        assert self.engine._guides is not None
        self.workers = self.engine._guides.workers
        self.workers._has_fillers = True  # what they do is done by `make_masks`
        self.workers.wait = lambda timeout_s: self.make_masks(1)

    @rule(most=st.integers(1, 3))
    def make_masks(self, most: int) -> None:
        """Make masks that were asked for; until then the threads are at it."""
        for _ in range(min(most, self.workers._fills.qsize())):
            fill = self.workers._fills.get()
            self.workers._finish(self.workers._filled, fill, self.workers._fill_alone(fill))

    @rule(
        prompt=prompts,
        text=st.sampled_from(TEXTS),
        bounds=st.tuples(st.integers(1, 24), st.sampled_from([0, 0, 3, 9])),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 5]),
        n=st.sampled_from([1, 1, 2, 3]),
        end_ids=st.sampled_from([(END,), (), (END, 7), (5,)]),
        bad_words=st.sampled_from([(), (), ((3,), (9, 11))]),
        no_repeat=st.sampled_from([0, 0, 2]),
        values=st.sampled_from([None, None, *WANTED]),
        times=st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 0, 8])),
        seed=st.integers(0, 999),
    )
    def guide(
        self,
        prompt: list[int],
        text: str,
        bounds: tuple[int, int],
        times: tuple[int, int],
        bad_words: tuple[tuple[int, ...], ...],
        no_repeat: int,
        **sampling: object,
    ) -> None:
        most, least = bounds
        more = {"bad_words": bad_words, "no_repeat_ngram_size": no_repeat}
        parts = {"max_tokens": most, "min_tokens": least, "guide": guide("regex", text)}
        before = len(self.asked)
        self.submit(prompt, SamplingParams(**parts, **more, **sampling), *times, "", None)
        while self.num_compiled() < len(self.workers._compiles):
            time.sleep(0.0002)
        if text == "breaks" and len(self.asked) > before:
            self.may_fail.add(max(self.asked))

    def num_compiled(self) -> int:
        """Return how many guides are compiled and not reported."""
        return sum(report == self.workers._compiled for report, *_ in self.workers._done)

    @rule(is_slow=st.booleans())
    def slow_down(self, is_slow: bool) -> None:
        """Let all masks count as slow, or as fast."""
        workers_module._FAST_S = -1.0 if is_slow else inf

    def teardown(self) -> None:
        super().teardown()
        workers_module._FAST_S = 0.0005

    def defined(
        self, prompt: list[int], sampling: SamplingParams, index: int
    ) -> tuple[bytes, FinishReason]:
        if sampling.guide is None:
            return super().defined(prompt, sampling, index)
        token_ids, reason = guided(prompt, sampling, index)
        return b"".join(map(Words().raw, token_ids)), reason


TestGuidedMachine = pytest.mark.rest(GuidedMachine.TestCase)
TestGuidedMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
