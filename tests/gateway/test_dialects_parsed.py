"""Recorded answers of every format, in chunks, as responses and messages: folds are wholes."""

import json

import pytest
from fixtures.gateway.answers import Made, stream
from fixtures.gateway.folds import events, fold_message, fold_response
from fixtures.gateway.recorded import CHOICE, RECORDED, answers_of, special_ids, tokens
from slipstream_gateway.answer import Finish
from slipstream_gateway.dialects.messages_writer import MessagesWriter
from slipstream_gateway.dialects.responses_writer import ResponsesWriter

IDS = [f"{number}-{each.tool_parser}" for number, each in enumerate(RECORDED)]


def made_of(recorded, size: int) -> Made:
    """The answer's deltas as its parser gives them for chunks of `size` tokens, one a write."""
    parser = answers_of(recorded).parser(CHOICE, recorded.prompt)
    given = tokens(recorded.answer, special_ids(recorded), 4)
    chunks = [given[at : at + size] for at in range(0, len(given), size)]
    writes = [(parser.feed([n for n, _ in c], [text for _, text in c]), []) for c in chunks]
    writes.append((parser.finish(), []))
    return Made(writes, Finish("tool_calls" if recorded.calls else "stop"))


@pytest.mark.parametrize("recorded", RECORDED, ids=IDS)
@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_recorded_answers_are_whole_in_both_dialects(recorded, size):
    made = made_of(recorded, size)
    response = fold_response(events(stream(ResponsesWriter({}, [], "m", "0"), made)))
    whole = json.loads(ResponsesWriter({}, [], "m", "0").whole([made.whole], made.usage))
    assert response["output"] == whole["output"]
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if "name" in item]
    assert tuple(calls) == recorded.calls
    message = fold_message(events(stream(MessagesWriter({}, "m", "0"), made)))
    assert message == json.loads(MessagesWriter({}, "m", "0").whole([made.whole], made.usage))
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    assert [(use["name"], use["input"]) for use in uses] == [
        (name, json.loads(arguments)) for name, arguments in recorded.calls
    ]
    assert len({use["id"] for use in uses}) == len(uses)
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    assert "".join(texts) == recorded.text
