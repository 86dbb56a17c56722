"""What a stream's client joins is the answer that is not streamed, byte for byte."""

from typing import Any

from fixtures.gateway.served import Gateway, Response
from hypothesis import example, given, settings
from hypothesis import strategies as st

PROMPTS = ["import os\n", "def f(x):\n    ", "class A:", "é\n# 漢字 "]


def options(is_chat: bool) -> st.SearchStrategy[dict[str, Any]]:
    optional = {
        "n": st.integers(1, 3),
        "stop": st.sampled_from([["\n"], [" ", "e"], "return"]),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([5, 50]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "ignore_eos": st.booleans(),
        "return_token_ids": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "logit_bias": st.just({"300": 3, "17": -100}),
    }
    if is_chat:
        optional |= {"logprobs": st.booleans(), "echo": st.booleans()}
    else:
        optional |= {"logprobs": st.integers(0, 3), "echo": st.booleans()}
    required = {"seed": st.integers(0, 1 << 40), "max_tokens": st.integers(1, 5)}
    return st.fixed_dictionaries(required, optional=optional)


def joined_chat(response: Response) -> tuple[list[dict[str, Any]], object]:
    """The choices and the usage that a client joins from the chunks of a chat."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    ids = {(chunk["id"], chunk["created"]) for chunk in response.chunks}
    assert len(ids) == 1
    for chunk in response.chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            own = choices.setdefault(part["index"], {"content": "", "log_probs": [], "ids": []})
            assert "finish_reason" not in own, "a chunk after the last"
            delta = part["delta"]
            if not own.get("has_role"):
                assert delta == {"role": "assistant", "content": ""}
                own["has_role"] = True
            own["content"] += delta.get("content") or ""
            own["log_probs"] += (part["logprobs"] or {}).get("content") or []
            own["ids"] += part.get("token_ids") or []
            if part["finish_reason"] is not None:
                own["finish_reason"] = part["finish_reason"]
                own["stop_reason"] = part.get("stop_reason")
    return [choices[index] for index in range(len(choices))], usage


def whole_chat(response: Response) -> list[dict[str, Any]]:
    return [
        {
            "has_role": True,
            "content": choice["message"]["content"],
            "log_probs": (choice["logprobs"] or {}).get("content") or [],
            "ids": choice.get("token_ids") or [],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
        }
        for choice in response.json["choices"]
    ]


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined_completion(response: Response) -> tuple[list[dict[str, Any]], object]:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in response.chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            own = choices.setdefault(part["index"], {"text": "", "ids": [], "finish_reason": None})
            assert own["finish_reason"] is None, "a chunk after the last"
            own["text"] += part["text"]
            for name in LISTS:
                values = (part["logprobs"] or {}).get(name)
                if values is not None:
                    own[name] = own.get(name, []) + values
            own["ids"] += part.get("token_ids") or []
            own["finish_reason"], own["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return [choices[index] for index in range(len(choices))], usage


def whole_completion(response: Response) -> list[dict[str, Any]]:
    found = []
    for choice in response.json["choices"]:
        lists = {name: (choice["logprobs"] or {}).get(name) for name in LISTS}
        found.append(
            {
                "text": choice["text"],
                "ids": choice.get("token_ids") or [],
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
                **{name: values for name, values in lists.items() if values},
            }
        )
    return found


def without_stream(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


@settings(max_examples=100)
@example(text=PROMPTS[0], body={"seed": 1, "max_tokens": 9, "n": 2, "logprobs": True, "echo": True})
@given(text=st.sampled_from(PROMPTS), body=options(is_chat=True))
def test_chat_streams(gateway: Gateway, text: str, body: dict[str, Any]):
    whole = gateway.chat(text, **without_stream(body))
    streamed = gateway.chat(text, **body, stream=True)
    assert (whole.status, streamed.status) == (200, 200), (whole.data, streamed.data)
    choices, usage = joined_chat(streamed)
    assert choices == whole_chat(whole)
    assert len(choices) == body.get("n", 1)
    own = whole.json["usage"]
    wanted = own if "stream_options" in body else None
    if wanted:
        assert usage is not None
        wanted["prompt_tokens_details"] = usage["prompt_tokens_details"]  # the cache has it now
    assert usage == wanted


@settings(max_examples=100)
@example(
    prompt="import os\n", body={"seed": 1, "max_tokens": 9, "n": 2, "logprobs": 2, "echo": True}
)
@example(prompt=["a b", "c"], body={"seed": 1, "max_tokens": 3, "n": 2, "logprobs": 0})
@example(  # an echoed prompt of one token, behind which nothing is shown
    prompt=[302],
    body={"seed": 7699014, "max_tokens": 1, "temperature": 1.5, "stop": ["\n"], "n": 3}
    | {"echo": True, "logprobs": 0},
)
@given(
    prompt=st.sampled_from([*PROMPTS, PROMPTS[:2], [5, 6, 7], [[300, 301], [302]], [17]]),
    body=options(is_chat=False),
)
def test_completions_stream(gateway: Gateway, prompt: object, body: dict[str, Any]):
    whole = gateway.complete(prompt=prompt, **without_stream(body))
    streamed = gateway.complete(prompt=prompt, **body, stream=True)
    assert (whole.status, streamed.status) == (200, 200), (whole.data, streamed.data)
    choices, usage = joined_completion(streamed)
    assert choices == whole_completion(whole)
    own = whole.json["usage"]
    if "stream_options" in body:
        assert usage is not None
        own["prompt_tokens_details"] = usage["prompt_tokens_details"]
        assert usage == own
    for choice in choices:
        if "tokens" in choice and body.get("echo"):
            assert choice["token_logprobs"][0] is None
