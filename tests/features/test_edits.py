"""Edits by an operator's options, and ends, through every model name of a whole house."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.bridge.texts import TEXT
from fixtures.features import answers
from fixtures.features.house import House
from fixtures.features.table import LENGTH, MODELS, body_of
from fixtures.tiers import quick_of
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.tensors import LLMAPI

MARK = "# so:"
PLACES = "slipstream.core.processors:SoftLength,fixtures.engine.processors:Odd"
GREEDY = ["greedy"]


@pytest.fixture(scope="module", params=quick_of(["none", "lookup"], ["lookup"]))
def house(request, tmp_path_factory) -> Iterator[House]:
    options = {"thinking_end": MARK, "logits_processors": PLACES, "speculation": request.param}
    house = House(tmp_path_factory.mktemp("house"), **options)
    yield house
    house.engine.check_integrity()
    house.close()


def ask(house: House, model: str, **fields: Any) -> answers.Answer:
    """Return the answer to a greedy request with more fields, named as in vLLM."""
    body = body_of(model, GREEDY)
    if model == "vllm_model":
        sampling = json.loads(body["sampling_parameters"]) | fields
        body["sampling_parameters"] = json.dumps(sampling)
    else:
        body |= {
            name: json.dumps(value) if isinstance(value, dict) else value
            for name, value in fields.items()
        }
    return answers.read(model, GREEDY, house.ask(model, body))


@pytest.mark.parametrize("model", MODELS[1:])
def test_thinking_ends_after_its_budget(house: House, model: str) -> None:
    plain = ask(house, model).texts[0]
    for budget in (0, 4):
        text = ask(house, model, thinking_token_budget=budget).texts[0]
        thought, mark, _ = text.partition(MARK)
        assert mark
        assert plain.startswith(thought)
        assert len(TEXT.encode(thought)) == budget if budget else not thought
    assert ask(house, model, thinking_token_budget=LENGTH).texts[0] == plain


@pytest.mark.parametrize("model", MODELS[1:])
def test_a_logits_processor_is_asked_for_by_name(house: House, model: str) -> None:
    plain, mark = ask(house, model).texts[0], TEXT.encode("z")[-1]
    asked = {"soft_length": {"token_ids": [mark], "start": 3, "slope": 100}}
    text = ask(house, model, logits_processors=asked).texts[0]
    assert text != plain
    assert text.endswith("z" * (LENGTH - 4))
    asked = {"soft_length": {"token_ids": [mark], "start": LENGTH}}
    assert ask(house, model, logits_processors=asked).texts[0] == plain


@pytest.mark.parametrize("model", MODELS[1:])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"none": {}}, "INVALID_ARGUMENT: logits_processors has 'none', not one of odd, soft_leng"),
        ({"soft_length": {}}, "INVALID_ARGUMENT: logits_processors.soft_length: token_ids is None"),
        ({"soft_length": 5}, "INVALID_ARGUMENT: logits_processors.soft_length is 5, not an object"),
        ({"odd": {"after": 2}}, "INTERNAL: logits_processors.odd failed: IndexError"),
    ],
)
def test_what_a_processor_refuses_names_it(house: House, model: str, asked: Any, said: str) -> None:
    plain = ask(house, model)
    with pytest.raises(ContractError) as caught:
        ask(house, model, logits_processors=asked)
    assert str(caught.value).startswith(said)
    assert ask(house, model) == plain


@pytest.mark.parametrize("model", MODELS[1:])
def test_a_request_that_leaves_no_token_is_told_why(house: House, model: str) -> None:
    word = TEXT.encode("self")
    allowed = json.dumps(word) if model == LLMAPI.name else word
    with pytest.raises(ContractError, match="no token is left: allowed_token_ids and") as caught:
        ask(house, model, allowed_token_ids=allowed, no_repeat_ngram_size=1)
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("model", MODELS[1:])
def test_no_stop_word_counts_before_min_tokens(house: House, model: str) -> None:
    """As vLLM: the first token in which one may end comes after `min_tokens` others."""
    plain = ask(house, model).texts[0]
    tokens = [TEXT.vocab.raw(token_id) for token_id in TEXT.encode(plain)]
    assert b"".join(tokens).decode() == plain
    assert len(tokens) == LENGTH
    word = max(set(plain), key=plain.count)  # it is in several tokens
    ends = [i for i, token in enumerate(tokens, start=1) if word.encode() in token]
    name = {"vllm_model": "stop", LLMAPI.name: "sampling_param_stop"}.get(model, "stop_words")
    if model == "tensorrt_llm":
        return  # the same schema as the text models, with token ids
    for least in (ends[0] - 1, ends[0], ends[-1]):
        text = ask(house, model, **{name: [word], "min_tokens": least}).texts[0]
        found = next((end for end in ends if end > least), None)
        last = LENGTH if found is None else found
        told = b"".join(tokens[: last - 1]) + tokens[last - 1]
        if found is not None:
            cut = len(b"".join(tokens[: last - 1])) + tokens[last - 1].index(word.encode())
            keeps = model == "tensorrt_llm_bls"
            told = told[: cut + len(word.encode()) * keeps]
        assert text == told.decode()
