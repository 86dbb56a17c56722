"""Streams of the responses and messages dialects, folded as SDKs do, equal the whole answer."""

import json
from typing import Any

from fixtures.gateway.answers import Made, answers, joined_log_probs, stream
from fixtures.gateway.folds import events, fold_message, fold_response
from hypothesis import given
from hypothesis import strategies as st
from slipstream_gateway.answer import Call, Reasoning, Text
from slipstream_gateway.dialects.messages_writer import MessagesWriter
from slipstream_gateway.dialects.responses_writer import ResponsesWriter
from slipstream_gateway.errors import ApiError

ASKED = {"input": "hi", "top_logprobs": 1}


def response_writer(body: dict[str, Any]) -> ResponsesWriter:
    return ResponsesWriter(body, [], "m", ident="0")


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "created_at": 0, "completed_at": response["completed_at"] is not None}


@given(answers())
def test_a_folded_response_is_the_whole_one(made: Made) -> None:
    writer = response_writer({"input": "hi"})
    folded = fold_response(events(stream(writer, made)))
    whole = json.loads(response_writer({"input": "hi"}).whole([made.whole], made.usage))
    assert timeless(folded) == timeless(whole)
    items = whole["output"]
    kinds = {"message": Text, "reasoning": Reasoning, "function_call": Call}
    wanted = [type(part) for part in made.whole.parts] or [Text]
    assert [kinds[item["type"]] for item in items] == wanted
    texts = [part["text"] for item in items for part in item.get("content", ())]
    assert "".join(texts) == "".join(
        part.text for part in made.whole.parts if not isinstance(part, Call)
    )
    assert [item["arguments"] for item in items if "arguments" in item] == [
        call.arguments for call in made.whole.calls
    ]


@given(answers(has_log_probs=True))
def test_log_probs_of_all_tokens_are_in_a_response_once(made: Made) -> None:
    folded = fold_response(events(stream(response_writer(ASKED), made)))
    whole = json.loads(response_writer(ASKED).whole([made.whole], made.usage))
    streamed = joined_log_probs(folded["output"])
    assert streamed == joined_log_probs(whole["output"])
    assert timeless(folded) == timeless(whole)
    has_text = any(item["type"] == "message" for item in whole["output"])
    assert len(streamed) == (len(made.whole.log_probs) if has_text else 0)


@given(answers(), st.data())
def test_a_response_that_fails_keeps_what_came(made: Made, data: st.DataObject) -> None:
    writer = response_writer({"input": "hi"})
    num_writes = data.draw(st.integers(0, len(made.writes)))
    sent = stream(writer, made, num_writes)
    found = events(sent + writer.fail(ApiError(500, "the engine is gone")))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    error, failed = found[-2:]
    assert error["error"]["message"] == error["message"] == "the engine is gone"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine is gone"}
    came = Made(made.writes[:num_writes], made.finish).whole
    arguments = [i["arguments"] for i in failed["response"]["output"] if "arguments" in i]
    assert arguments == [call.arguments for call in came.calls]
    assert "in_progress" not in {item["status"] for item in failed["response"]["output"]}


@given(answers(), st.booleans())
def test_a_folded_message_is_the_whole_one(made: Made, shows: bool) -> None:
    thinking = {"type": "enabled", "display": "summarized" if shows else "omitted"}
    body = {"thinking": thinking}
    folded = fold_message(events(stream(MessagesWriter(body, "m", "0"), made)))
    whole = json.loads(MessagesWriter(body, "m", "0").whole([made.whole], made.usage))
    assert folded == whole
    thoughts = [block["thinking"] for block in whole["content"] if block["type"] == "thinking"]
    assert "".join(thoughts) == (made.whole.reasoning if shows else "")
    texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
    assert "".join(texts) == made.whole.text
    if made.finish.reason != "length":
        inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
        assert inputs == [json.loads(call.arguments) for call in made.whole.calls]


@given(answers(), st.data())
def test_a_message_that_fails_ends_with_an_error(made: Made, data: st.DataObject) -> None:
    writer = MessagesWriter({}, "m")
    sent = stream(writer, made, data.draw(st.integers(0, len(made.writes))))
    error = events(sent + writer.fail(ApiError(503, "no engine")))[-1]
    shape = {"type": "overloaded_error", "message": "no engine"}
    assert error == {"type": "error", "error": shape}
