"""A request whose own rules raise while a step is scheduled or committed ends alone.

Something of it raises in its n-th call. Others get what they get alone, and all blocks come back.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from fixtures.engine.checks import check, greedy, samplings, token_ids
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import RandomDrafts
from fixtures.engine.hashed import VOCAB_SIZE, Words
from fixtures.guide.real import GuidedEngine, guide
from fixtures.guide.toy import END, ToyCompiler, ToyMatcher, expected
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slipstream.core.drafts import Speculation
from slipstream.core.dry import Dry
from slipstream.core.edits import EditContext, Edits
from slipstream.core.moving import Mirostat, Reset
from slipstream.core.ngrams import NoRepeat, PromptNgrams
from slipstream.core.stop import StopChecker
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.guide.interface import Matcher, Template
from slipstream.wire import FinishReason
from slipstream_contract.beams import Beams
from slipstream_contract.guide import Guide

RESET = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_reset_ids": 1}
DRY = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
PLACES: dict[str, tuple[type, dict[str, Any]]] = {  # a method: its class, and what has it called
    "NoRepeat.addends": (NoRepeat, {"no_repeat_ngram_size": 2}),
    "NoRepeat.__init__": (NoRepeat, {"no_repeat_ngram_size": 2}),
    "PromptNgrams.__init__": (PromptNgrams, {"no_repeat_ngram_size": 2}),
    "PromptNgrams.read": (PromptNgrams, {"no_repeat_ngram_size": 2}),
    "Dry.__init__": (Dry, DRY),
    "Dry.addends": (Dry, DRY),
    "Reset.next": (Reset, RESET),
    "Mirostat.next": (Mirostat, {"mirostat": 2}),
    "Edits.pack": (Edits, {"no_repeat_ngram_size": 2}),
    "StopChecker._match": (StopChecker, {"stop_words": (b"cccccc",)}),
}
QUICK = ("NoRepeat.addends", "PromptNgrams.__init__", "Reset.next", "Edits.pack")
QUICK += ("StopChecker._match",)
CROWDS = st.lists(
    st.tuples(st.lists(token_ids, min_size=1, max_size=12), samplings()), min_size=1, max_size=4
)


def failing(wrapped: Callable[..., Any], number: int, raised: list[int]) -> Callable[..., Any]:
    """Return a function that raises in its call of this number, and in no other."""
    calls = count()

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raised.append(number)
            raise ValueError("planted")
        return wrapped(*arguments, **named)

    return call


@pytest.mark.parametrize("place", quick_of(PLACES, QUICK))
@settings(max_examples=12, deadline=None)
@given(
    crowd=CROWDS,
    number=st.sampled_from([0, 0, 1, 2, 5]),
    shape=st.sampled_from([{}, {"n": 3}, {"beams": Beams(width=3), "n": 2}]),
    most=st.sampled_from([0, 3]),
    num_blocks=st.sampled_from([24, 60]),
    max_in_flight=st.integers(1, 2),
)
def test_a_rule_that_raises_ends_its_request_alone(
    place: str,
    crowd: Any,
    number: int,
    shape: dict[str, Any],
    most: int,
    num_blocks: int,
    max_in_flight: int,
) -> None:
    (kind, fields), name = PLACES[place], place.partition(".")[2]
    drafts = RandomDrafts(AttentionWindow())
    drafts.most = most
    runner = CountingRunner(num_blocks, 2, max_in_flight=max_in_flight)
    context = EditContext(VOCAB_SIZE, Words())
    engine = Engine(
        Limits(8, 16, max_num_rows=32), runner, Words(), speculation=drafts, edit_context=context
    )
    client, raised = Client(engine), list[int]()
    plain = [(prompt, replace(each, no_repeat_ngram_size=0)) for prompt, each in crowd]
    if kind is Edits:  # others have edits, too
        plain = [
            (p, replace(s, bad_words=(), allowed_token_ids=(), min_tokens=0)) for p, s in plain
        ]
    if kind is StopChecker:
        plain = [(p, replace(s, stop_words=())) for p, s in plain]
    if kind in (Mirostat, Reset):  # which no drafts and no beams have
        shape, drafts.most = {}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, failing(getattr(kind, name), number, raised))
        numbers = [client.submit(prompt, sampling) for prompt, sampling in plain]
        bad = client.submit([1, 2, 3, 1, 2], greedy(9, **(shape | fields)))
        while engine.has_work:
            client.step()
            assert engine.fatal is None
        client.drain(0)
    for each, (prompt, sampling) in zip(numbers, plain, strict=True):
        check(client, each, prompt, sampling)
    reasons = [s.reason for (n, _), s in client.streams.items() if n == bad]
    # Where a draft was, the rule may raise behind one that is wrong: the request does not fail.
    assert not raised or most or FinishReason.ERROR in reasons
    assert raised or FinishReason.ERROR not in reasons


class Spoiled(ToyMatcher):
    """A matcher that raises in a call of one method, as no library should."""

    place, number, raised = "", 0, 0

    def _count(self, place: str) -> None:
        if place == Spoiled.place:
            Spoiled.number -= 1
            if Spoiled.number < 0 and not Spoiled.raised:
                Spoiled.raised = 1
                raise ValueError("planted")

    @property
    def is_accepting(self) -> bool:
        self._count("is_accepting")
        return super().is_accepting

    @property
    def is_finished(self) -> bool:
        self._count("is_finished")
        return super().is_finished

    def fill(self, address: int) -> None:
        self._count("fill")
        super().fill(address)

    def take(self, token_id: int) -> bool:
        self._count("take")
        return super().take(token_id)

    def forced(self, most: int) -> list[int]:
        self._count("forced")
        return super().forced(most)

    def roll_back(self, count: int) -> None:
        self._count("roll_back")
        super().roll_back(count)

    def copy(self) -> Matcher:
        self._count("copy")
        other = Spoiled(self.text, self.slow)
        other.taken = list(self.taken)
        return other


CALLS = ["is_accepting", "is_finished", "fill", "take", "forced", "roll_back", "copy"]


class SpoiledCompiler(ToyCompiler):
    """Makes spoiled matchers of guides whose text says so."""

    def compile(self, guide: Guide) -> Template:
        made = super().compile(guide)
        if not guide.text.endswith("spoiled"):
            return made
        return Template(Spoiled(guide.text, {}), made.first_mask, 100)


@pytest.mark.parametrize("place", quick_of(CALLS, ("fill", "take", "forced", "copy")))
@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from(["", "x", "y", "f1"]), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 3, 8]),
    st.sampled_from([{}, {"n": 3}, {"beams": Beams(width=3), "n": 2}, {"top_k": 3}]),
    st.sampled_from(["spoiled", "f spoiled"]),
    st.booleans(),
)
def test_a_matcher_that_raises_ends_its_request_alone(
    place, crowd, number, shape, text, has_drafts
):
    Spoiled.place, Spoiled.number, Spoiled.raised = place, number, 0
    compiler = SpoiledCompiler({}, {})
    drafts: Speculation | None = RandomDrafts(AttentionWindow()) if has_drafts else None
    engine = GuidedEngine(CountingRunner(64, 4), lambda: compiler, Limits(8, 64), drafts)
    sampling = {"temperature": 1.0, "max_tokens": 12, "end_ids": (END,)}
    numbers = [
        engine.submit([seed + 1], guide("regex", each) if each else None, seed=seed, **sampling)
        for seed, each in enumerate(crowd)
    ]
    engine.submit([1, 2], guide("regex", text), **(sampling | {"seed": 7} | shape))
    engine.drain(engine.engine.check_integrity)
    assert engine.engine.fatal is None
    for seed, (each, wanted) in enumerate(zip(numbers, crowd, strict=True)):
        if wanted:
            assert engine.outputs.get((each, 0), []) == expected(wanted, [seed + 1], seed, 12)
        else:
            assert engine.outputs[each, 0]
