"""Fields of chat completions and completions, each by what it does on a real engine."""

import json
import re
from typing import Any

import pytest
from fixtures.gateway.served import MODEL, Gateway

PROMPT = "import os\n"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def complete(gateway: Gateway, **body: Any) -> dict[str, Any]:
    found = gateway.complete(**{"prompt": PROMPT, "max_tokens": 6, "seed": 1, **body})
    assert found.status == 200, found.data
    return found.json


def chat(gateway: Gateway, **body: Any) -> dict[str, Any]:
    found = gateway.chat(**{"max_tokens": 60, "seed": 1, **body})
    assert found.status == 200, found.data
    return found.json


def test_shapes(gateway: Gateway):
    body = complete(gateway)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 6
    talk = chat(gateway, model="ensemble", max_tokens=2, request_id="mine")
    assert (talk["object"], talk["id"], talk["model"]) == (
        "chat.completion",
        "chatcmpl-mine",
        "ensemble",
    )
    message = talk["choices"][0]["message"]
    assert message.keys() == {"role", "content", "refusal"}


def test_max_tokens_of_a_completion_is_16(gateway: Gateway):
    body = gateway.complete(prompt=PROMPT, ignore_eos=True).json
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("is_streaming", [False, True])
def test_json_of_a_schema(gateway: Gateway, is_streaming: bool):
    """The wrapper's inner schema holds: plain JSON would hardly have this one key."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    found = gateway.chat(response_format=form, max_tokens=60, seed=1, stream=is_streaming)
    assert found.status == 200, found.data
    if is_streaming:
        deltas = [chunk["choices"][0]["delta"] for chunk in found.chunks]
        text = "".join(delta.get("content", "") for delta in deltas)
    else:
        text = found.json["choices"][0]["message"]["content"]
    value = json.loads(text)
    assert value.keys() == {"n"}
    assert 0 <= value["n"] <= 99


def test_other_guides(gateway: Gateway):
    regex = complete(gateway, structured_outputs={"regex": "[ab]{3}"})
    assert re.fullmatch("[ab]{3}", regex["choices"][0]["text"])
    choice = complete(gateway, guided_choice=["yes", "no"])
    assert choice["choices"][0]["text"] in ("yes", "no")
    text = chat(gateway, response_format={"type": "text"}, max_tokens=2)
    assert text["choices"][0]["finish_reason"] == "length"


def test_what_an_evaluation_asks_for(gateway: Gateway):
    """A batch of token ids with `echo` and `logprobs`, as lm-eval sends it."""
    ids = gateway.post("/tokenize", {"prompt": PROMPT}).json["tokens"]
    body = {"prompt": [ids, ids[:2]], "max_tokens": 1, "temperature": 0, "logprobs": 1}
    found = complete(gateway, **body, echo=True)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    for choice, prompt in zip(found["choices"], (ids, ids[:2]), strict=True):
        lists = choice["logprobs"]
        assert {len(each) for each in lists.values()} == {len(prompt) + 1}
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        for value, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
            assert value in top.values()
            assert value <= max(top.values())
        assert "".join(lists["tokens"]) == choice["text"]
        offsets = [choice["text"][at:] for at in lists["text_offset"]]
        assert all(
            text.startswith(token) for text, token in zip(offsets, lists["tokens"], strict=True)
        )
    nothing = complete(gateway, **{**body, "max_tokens": 0}, echo=True)
    assert [len(choice["logprobs"]["tokens"]) for choice in nothing["choices"]] == [len(ids), 2]
    assert nothing["usage"]["completion_tokens"] == 0


def test_log_probs_of_a_prompt(gateway: Gateway):
    found = complete(gateway, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    first, *others = found["prompt_logprobs"]
    assert first is None
    ids = found["prompt_token_ids"]
    assert len(others) == len(ids) - 1
    for entry, token_id in zip(others, ids[1:], strict=True):
        assert entry[str(token_id)]["rank"] >= 1


def test_log_probs_of_a_chat(gateway: Gateway):
    found = chat(gateway, logprobs=True, top_logprobs=3, max_tokens=3, temperature=0)
    for entry in found["choices"][0]["logprobs"]["content"]:
        tops = [each["logprob"] for each in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 3
        assert entry["logprob"] == tops[0]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    named = chat(gateway, logprobs=True, return_tokens_as_token_ids=True, max_tokens=1)
    token = named["choices"][0]["logprobs"]["content"][0]["token"]
    assert re.fullmatch(r"token_id:\d+", token)


def test_stops(gateway: Gateway):
    free = complete(gateway, max_tokens=12, temperature=0, ignore_eos=True)["choices"][0]["text"]
    word = free[4:7]
    cut = complete(gateway, max_tokens=12, temperature=0, ignore_eos=True, stop=[word])
    choice = cut["choices"][0]
    assert choice["text"] == free[: free.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    kept = complete(
        gateway,
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        stop=word,
        include_stop_str_in_output=True,
    )
    assert kept["choices"][0]["text"] == free[: free.index(word) + len(word)]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_beam_search(gateway: Gateway, is_streaming: bool):
    body = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "use_beam_search": True}
    found = gateway.complete(**body, stream=is_streaming)
    assert found.status == 200, found.data
    if is_streaming:
        parts = [part for chunk in found.chunks for part in chunk["choices"]]
        texts = ["".join(p["text"] for p in parts if p["index"] == index) for index in range(2)]
    else:
        texts = [choice["text"] for choice in found.json["choices"]]
    assert len(set(texts)) == 2
    assert texts == [choice["text"] for choice in gateway.complete(**body).json["choices"]]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_beam_search_of_several_prompts(gateway: Gateway, is_streaming: bool):
    prompts = [PROMPT, "def read(path):\n"]
    body = {"max_tokens": 3, "n": 2, "use_beam_search": True}
    alone = [c["text"] for p in prompts for c in complete(gateway, prompt=p, **body)["choices"]]
    found = gateway.complete(prompt=prompts, **body, stream=is_streaming)
    assert found.status == 200, found.data
    chunks = found.chunks if is_streaming else [found.json]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert ["".join(p["text"] for p in parts if p["index"] == i) for i in range(4)] == alone


def test_a_beam_search_whose_time_is_over(gateway: Gateway):
    """Wherever the search is then: a message without beams ends all answers."""
    body = {"max_tokens": 400, "n": 3, "use_beam_search": True, "ignore_eos": True}
    for timeout_ms in (1, 300):
        found = gateway.complete(prompt=[PROMPT, "def f():"], **body, timeout_ms=timeout_ms)
        assert found.status == 504, found.data


def test_the_best_of_several(gateway: Gateway):
    found = complete(gateway, n=1, best_of=3, logprobs=0)
    assert len(found["choices"]) == 1


def test_a_prompt_that_is_cut(gateway: Gateway):
    ids = list(range(300, 320))
    left = complete(gateway, prompt=ids, truncate_prompt_tokens=3, return_token_ids=True)
    assert left["choices"][0]["prompt_token_ids"] == ids[-3:]
    right = complete(
        gateway,
        prompt=ids,
        truncate_prompt_tokens=3,
        truncation_side="right",
        return_token_ids=True,
    )
    assert right["choices"][0]["prompt_token_ids"] == ids[:3]


def test_an_answer_that_goes_on(gateway: Gateway):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "import os"}]
    body = {
        "messages": messages,
        "max_tokens": 3,
        "continue_final_message": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    found = gateway.post("/v1/chat/completions", body).json
    shown = gateway.post("/detokenize", {"tokens": found["prompt_token_ids"]}).json["prompt"]
    assert shown.endswith("<|assistant|>\nimport os")
    echoed = gateway.post("/v1/chat/completions", {**body, "echo": True}).json
    text = found["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == f"import os{text}"


def test_usage_in_every_chunk(gateway: Gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = gateway.complete(prompt=PROMPT, max_tokens=4, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    plain = gateway.complete(prompt=PROMPT, max_tokens=2, stream=True).chunks
    assert all("usage" not in chunk for chunk in plain)
    assert all(chunk["choices"] for chunk in plain)


def test_cached_tokens(gateway: Gateway):
    body = {"prompt": "x = 1\n" * 60, "max_tokens": 1, "cache_salt": "cached"}
    first, second = (gateway.complete(**body).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] <= second["prompt_tokens"]


def test_tokens_there_and_back(gateway: Gateway):
    text = "def f(x): return '\u00e9\u6f22'"
    found = gateway.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    assert gateway.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}
    messages = {"messages": [{"role": "user", "content": text}]}
    counted = gateway.post("/tokenize", messages).json["count"]
    asked = gateway.post("/v1/messages/count_tokens", {**messages, "model": "ensemble"})
    assert asked.json == {"input_tokens": counted}
    usage = gateway.post("/v1/chat/completions", {**messages, "max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] == counted
    assert gateway.get("/tokenizer_info").json["eos_token"] == "<|endoftext|>"
