"""A tool call that something cuts is not one to be made: `finish_reason` does not say so."""

import pytest
from slipstream import wire
from slipstream_gateway.answer import CallArguments, CallStart, Delta, Text
from slipstream_gateway.sequences import Answering, News, finish_of

BEGUN = [CallStart(0, "a", "f"), CallArguments(0, '{"a": ')]
WHOLE = [*BEGUN, CallArguments(0, "1}")]


@pytest.mark.parametrize(
    ("deltas", "is_whole"),
    [
        ([Text("a")], False),
        (BEGUN, False),
        (BEGUN[:1], False),
        (WHOLE, True),
        ([*WHOLE, Text("b")], True),
        ([*WHOLE, CallStart(1, "b", "g")], False),
        ([*WHOLE, CallStart(1, "b", "g"), CallArguments(1, "{}")], True),
        ([*WHOLE, CallStart(1, "b", "g"), CallArguments(1, '{"a"')], False),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_end_of_an_answer_with_calls(deltas: list[Delta], is_whole: bool, is_chunked: bool):
    answer = Answering(None, None, None)  # type: ignore[arg-type]
    for chunk in [[each] for each in deltas] if is_chunked else [deltas]:
        answer._note(News([], [], []), chunk)
    assert answer.ends_in_calls == is_whole
    for reason, said in (("END", "stop"), ("STOP", "stop"), ("LENGTH", "length")):
        finished = wire.Finished(wire.FinishReason[reason], 1, 1, None)  # type: ignore[arg-type]
        expected = "tool_calls" if is_whole and said == "stop" else said
        assert finish_of(finished, answer.ends_in_calls).reason == expected
