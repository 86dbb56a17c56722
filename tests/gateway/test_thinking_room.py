"""Thinking before a call that must come ends in time for it."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.request import GenerateRequest
from slipstream_contract.sampling import SamplingParams
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.prepare_chat import leave_room

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GUIDE = Guide(GuideKind.REGEX, "a")


def budget_of(choice: object, has_thinking: bool = True, **sampling: object) -> int | None:
    request = GenerateRequest(prompt="a", sampling=SamplingParams(**{"guide": GUIDE, **sampling}))
    text = SimpleNamespace(has_thinking=has_thinking)
    found = leave_room(request, read_choice(TOOLS, choice, None), text)
    return found.sampling.thinking_token_budget


@given(max_tokens=st.integers(1, 200_000))
def test_half_of_the_tokens_or_a_thousand_are_left(max_tokens: int) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        budget = budget_of(choice, max_tokens=max_tokens)
        assert budget is not None
        assert 0 <= budget < max_tokens or max_tokens == 1
        assert max_tokens - budget == min(max_tokens // 2, 1024)


def test_what_a_request_says_and_other_models_and_choices_stay() -> None:
    assert budget_of("required", max_tokens=100, thinking_token_budget=99) == 99
    assert budget_of("required", has_thinking=False, max_tokens=100) is None
    assert budget_of("auto", max_tokens=100) is None
    assert budget_of("none", max_tokens=100) is None
