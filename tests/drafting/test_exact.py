"""The default model with and without drafts, in deterministic mode: not one token differs.

Requests of random parameters: samplers, several answers, stop words, bans, guides, log probs; some
are preempted, some cancelled, and all are streamed. The quick tier sends a few by each drafter. All
10,000 by each of them is one command:

    SLIPSTREAM_EXACT=10000 .venv/bin/pytest -s -n auto --tier rest tests/drafting/test_exact.py
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from fixtures.engine.eager import Eager
from fixtures.guide.real import CHECKPOINT, END, VOCAB_SIZE, compiler, guide, vocabulary
from fixtures.tiers import quick_of
from msgspec.structs import replace
from slipstream.config import EngineConfig
from slipstream.core.drafts import Drafter
from slipstream.drafting.counts import DraftCounts
from slipstream.drafting.forced import WithForced
from slipstream.drafting.longest import LongestMatch
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.drafting.suffix import SuffixDrafts
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import FinishReason, Submit, Tokens
from slipstream_contract.drafts import Drafts
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

_OBJECT = (
    '{"type": "object", "properties": {"first_name": {"type": "string", "maxLength": 5}, '
    '"second_name": {"enum": ["one of a few", "one of many"]}}, "additionalProperties": false, '
    '"required": ["first_name", "second_name"]}'
)
GUIDES = [
    guide("json_schema", _OBJECT),
    guide("regex", "(yes|no|it is not known)"),
    guide("regex", "([a-z]{1,4} and then )*[a-z]{2}"),
    guide("json_object"),
]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lookup": PromptLookup,
    "suffix": SuffixDrafts,
    "auto": lambda: LongestMatch(PromptLookup(), SuffixDrafts(4000)),
    "forced": lambda: WithForced(None),
    "all": lambda: WithForced(LongestMatch(PromptLookup(), SuffixDrafts())),
}


def runner_of(num_tokens: int, speculation: str = "lookup") -> ModelRunner:
    config = EngineConfig(
        checkpoint=str(CHECKPOINT),
        device="cpu",
        deterministic=True,
        speculation=speculation,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=192,
        kv_cache_tokens=num_tokens,
    )
    return ModelRunner(resolve(config))


def asked(rng: random.Random) -> tuple[list[int], SamplingParams]:
    part = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 8))]
    prompt = part * rng.randint(1, 5)
    words = (b"the", b"\n\n", b" a", b"12", b"ing")
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 40),
        min_tokens=rng.choice([0, 5]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 0, 5, 50]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(2**32),
        n=rng.choice([1, 1, 2]),
        end_ids=(END, rng.randrange(VOCAB_SIZE)),
        stop_words=tuple(rng.sample(words, rng.choice([0, 0, 0, 1, 3]))),
        include_stop=rng.choice([False, True]),
        stop_token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 40]))),
        bad_words=tuple(
            tuple(rng.choices(part, k=rng.randint(1, 2))) for _ in range(rng.choice([0, 1]))
        ),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        log_probs=rng.choice([False, True]),
        guide=rng.choice([None] * 6 + GUIDES),
    )
    if sampling.guide is not None:  # few texts have tokens of chance in them
        sampling = replace(sampling, top_k=rng.choice([0, 0, 50]), top_p=1.0, min_p=0.0)
    return prompt, sampling


@dataclass
class Answer:
    """A sequence as it was streamed."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    last: Tokens | None = None

    @property
    def end(self) -> tuple[FinishReason, object, int, str | None]:
        assert self.last is not None
        assert self.last.finished is not None
        end = self.last.finished
        return end.reason, end.stop_reason, self.last.drop_bytes, end.error

    def differs(self, other: "Answer") -> bool:
        """Return whether the two differ, where both were streamed; a cancel may come sooner."""
        if FinishReason.CANCELLED in (self.end[0], other.end[0]):
            count = min(len(self.token_ids), len(other.token_ids))
            ours = self.token_ids[:count], self.log_probs[:count]
            return ours != (other.token_ids[:count], other.log_probs[:count])
        ours = self.token_ids, self.log_probs, self.end
        return ours != (other.token_ids, other.log_probs, other.end)


class Asking:
    """An engine, and what it was asked and answered."""

    def __init__(self, runner: ModelRunner, speculator: Speculator | None) -> None:
        limits = Limits(8, 128, max_num_rows=64)
        self.engine = Engine(
            limits, runner, vocabulary(), speculation=speculator, guide_compiler=compiler
        )
        self.answers: dict[tuple[int, int], Answer] = {}
        self.cancels: dict[int, int] = {}  # requests to cancel: after so many tokens

    def submit(self, prompt: list[int], sampling: SamplingParams) -> None:
        number = len({key[0] for key in self.answers})
        message = Submit(number, pack(prompt), sampling, 1)
        self.engine.submit(b"b", message)
        for index in range(sampling.n):
            self.answers[number, index] = Answer()

    def step(self) -> None:
        for tokens in self.engine.step().get(b"b", ()):
            answer = self.answers[tokens.request, tokens.index]
            answer.token_ids += tokens.token_ids
            answer.log_probs += tokens.log_probs
            answer.last = tokens
            if len(answer.token_ids) >= self.cancels.get(tokens.request, 1 << 30):
                self.engine.cancel(b"b", tokens.request)
        assert not self.engine.take_rejected()
        self.engine.check_integrity()


def outputs(
    runner: ModelRunner,
    speculator: Speculator | None,
    seed: int,
    count: int,
    drafts: Sequence[Drafts] = (),
) -> tuple[dict[tuple[int, int], Answer], DraftCounts]:
    """Return all answers, and what became of drafts.

    `drafts` are those that the requests bring or ask for, if any do.
    """
    rng = random.Random(seed)
    asking = Asking(runner, speculator)
    for number in range(count):
        prompt, sampling = asked(rng)
        own = drafts[number] if drafts else None
        if rng.random() < 0.1:
            asking.cancels[number] = rng.randint(1, 12)
        asking.submit(prompt, replace(sampling, drafts=own))
        while asking.engine._scheduler.num_waiting > 4:
            asking.step()
    while asking.engine.has_work:
        asking.step()
    return asking.answers, asking.engine._scheduler.draft_counts


def check(got: dict[tuple[int, int], Answer], want: dict[tuple[int, int], Answer]) -> None:
    assert got.keys() == want.keys()
    differing = [key for key in want if got[key].differs(want[key])]
    assert not differing, [(key, got[key], want[key]) for key in differing[:3]]


def compare(count: int, seed: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return how many drafts of each drafter there were, and how many were right."""
    runner = runner_of(768)  # too few for 8 sequences of 192
    plain, _ = outputs(runner, None, seed, count)
    num_drafts = {}
    for name in names:
        found, counts = outputs(runner, Eager(DRAFTERS[name](), 6), seed, count)
        check(found, plain)
        num_drafts[name] = counts.total("drafted_tokens"), counts.total("accepted_tokens")
    return num_drafts


def compare_asked(count: int, seed: int) -> None:
    """Compare with requests that bring drafts, right for a while, or ask for some."""
    runner, rng = runner_of(768, "none"), random.Random(seed)
    plain, _ = outputs(runner, None, seed, count)
    drafts = []
    for number in range(count):
        token_ids = plain[number, 0].token_ids
        right = token_ids[: rng.randint(0, 50)]
        others = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 3]))]
        most = rng.choice([None, None, 1, 8])
        drafts.append(Drafts(token_ids=(*right, *others), most=most))
    with_drafts, counts = outputs(runner, None, seed, count, drafts)
    check(with_drafts, plain)
    assert counts.total("accepted_tokens") > 0


@pytest.mark.parametrize("name", quick_of(list(DRAFTERS), ["all"]))
def test_a_few_requests(name: str) -> None:
    num_drafts, _ = compare(10, 2, [name])[name]  # some of them are guided
    assert num_drafts > 0


def test_a_few_requests_that_ask() -> None:
    compare_asked(6, 1)


COUNT = int(os.environ.get("SLIPSTREAM_EXACT", "16"))  # each a second or so by each drafter
EACH = 100


@pytest.mark.rest
@pytest.mark.timeout(0 if "SLIPSTREAM_EXACT" in os.environ else 300)
@pytest.mark.parametrize("seed", range(2, 2 + -(-COUNT // EACH)))
def test_many_requests(seed: int) -> None:
    num_drafts = compare(min(EACH, COUNT), seed, list(DRAFTERS))
    assert all(num_right for _, num_right in num_drafts.values()), num_drafts
    compare_asked(min(EACH, COUNT), seed)
    print(f"seed {seed}: drafts and right ones {num_drafts}, nothing differs", flush=True)
