"""What TensorRT-LLM's inputs say of drafts."""

from typing import Any

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import ContractError
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.tensors import MODELS

VOCAB_SIZE = 6


def tokens(parameters: dict[str, object] | None = None, **values: Any) -> Drafts | None:
    given = {"input_ids": [1], "input_lengths": 1, "request_output_len": 9} | values
    arrays = {name: array for name, array in given.items() if isinstance(array, np.ndarray)}
    plain = {name: value for name, value in given.items() if name not in arrays}
    inputs = inputs_of(MODELS["tensorrt_llm"], **plain) | arrays
    return llm_request(inputs, parameters or {}, vocab_size=VOCAB_SIZE).sampling.drafts


def text(parameters: dict[str, object] | None = None, **values: Any) -> Drafts | None:
    given = {"text_input": "a", "max_tokens": 9} | values
    inputs = inputs_of(MODELS["tensorrt_llm_bls"], **given)
    return text_request(inputs, parameters or {}).sampling.drafts


def logits(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def lookahead(window: object, ngram: object, count: object) -> dict[str, Any]:
    names = ("window_size", "ngram_size", "verification_set_size")
    pairs = zip(names, (window, ngram, count), strict=True)
    return {f"lookahead_{name}": value for name, value in pairs if value is not None}


def test_what_says_nothing_of_drafts() -> None:
    assert tokens() is None
    nothing = {"draft_input_ids": np.zeros(0, np.int32), "draft_logits": logits(0, VOCAB_SIZE)}
    assert tokens(**nothing, draft_acceptance_threshold=0.0) is None
    assert text(num_draft_tokens=0, use_draft_logits=False) is None


def test_drafts_of_a_client() -> None:
    own = Drafts(token_ids=(3, 1, 4))
    assert tokens(draft_input_ids=[3, 1, 4]) == own
    assert tokens(draft_input_ids=[3, 1, 4], draft_logits=logits(3, VOCAB_SIZE)) == own
    assert tokens(draft_input_ids=[3, 1, 4], draft_acceptance_threshold=1.0) == own
    assert tokens({"draft_acceptance_threshold": "1"}, draft_input_ids=[3, 1, 4]) == own


@pytest.mark.parametrize("is_parameter", [False, True])
def test_drafts_that_are_asked_for(is_parameter: bool) -> None:
    said = lookahead(4, 3, 0)
    assert (tokens(said) if is_parameter else tokens(**said)) == Drafts(most=2)
    assert tokens(lookahead(1, 1, 0)) == text(lookahead(1, 1, 0)) == Drafts(most=0)
    asked = {"num_draft_tokens": 5, "use_draft_logits": True}
    assert (text(asked) if is_parameter else text(**asked)) == Drafts(most=5)
    assert tokens(asked) == Drafts(most=5)
    assert text(asked | lookahead(9, 4, 9)) == Drafts(most=3)
    assert text(asked | lookahead(9, 40, 9)) == Drafts(most=5)
    assert tokens(said, draft_input_ids=[2]) == Drafts(token_ids=(2,), most=2)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"draft_input_ids": [1, -1]}, r"draft_input_ids\[1\] is -1, not a token id from 0"),
        ({"draft_input_ids": [1] * 1025}, "draft_input_ids has 1025 token ids, at most 1024 are"),
        ({"draft_logits": logits(1, 6)}, "draft_logits has 1 rows for 0 draft_input_ids"),
        (
            {"draft_input_ids": [1], "draft_logits": logits(2, 6)},
            "draft_logits has 2 rows for 1 draft_input_ids",
        ),
        (
            {"draft_input_ids": [1], "draft_logits": logits(1, 5)},
            "draft_logits has rows of 5 values, the vocabulary has 6 tokens",
        ),
        (
            {"draft_input_ids": [1, 2], "draft_logits": np.float32([[0] * 6, [*range(5), np.nan]])},
            r"draft_logits\[1, 5\] is nan, not a finite number",
        ),
        ({"draft_input_ids": [1], "draft_logits": logits(1, 6, dtype=np.float16)}, "has type"),
        (
            {"draft_input_ids": [1], "draft_acceptance_threshold": 0.5},
            "draft_acceptance_threshold is 0.5, neither 0 nor 1: .* would change the output",
        ),
        ({"draft_acceptance_threshold": 1.0}, "is 1, which has no effect without draft_input_ids"),
        ({"draft_acceptance_threshold": np.nan}, "draft_acceptance_threshold is nan"),
        (lookahead(4, 3, None), "lookahead_window_size is given without .*verification_set_size"),
        (lookahead(None, 3, None), "ngram_size is given without lookahead_window_size and look"),
        (lookahead(0, 3, 4), "lookahead_window_size is 0, not a whole number from 1 to 1024"),
        (lookahead(4, 66, 4), "lookahead_ngram_size is 66, not a whole number from 1 to 65"),
        (lookahead(4, 3, -1), "lookahead_verification_set_size is -1, not a whole number from 0"),
    ],
)  # fmt: skip
def test_what_is_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        tokens(**said)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"num_draft_tokens": 65}, "num_draft_tokens is 65, not a whole number from 0 to 64"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"use_draft_logits": True}, "use_draft_logits is true, .* without num_draft_tokens"),
        ({"use_draft_logits": True, "num_draft_tokens": 0}, "use_draft_logits is true"),
    ],
)
def test_what_is_refused_of_a_text(said: dict[str, Any], why: str) -> None:
    for ask in (text, tokens):
        with pytest.raises(ContractError, match=why):
            ask(said)
    with pytest.raises(ContractError, match=why):
        text(**said)
