"""Check drawn answers against the types of the SDKs, and let the SDKs' accumulators fold them.

    PYTHONPATH=gateway:ensemble:tests PYTHON load/sdks/shapes.py

PYTHON has `openai`, `anthropic`, `msgspec` and `hypothesis`; no server is needed.
"""

import json
import sys
from typing import Any, get_args

import anthropic
import openai
import pydantic
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from fixtures.gateway.answers import Made, answers, joined_log_probs, stream
from fixtures.gateway.folds import events
from hypothesis import HealthCheck, given, settings
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from slipstream_gateway.dialects.messages_writer import MessagesWriter
from slipstream_gateway.dialects.responses import functions
from slipstream_gateway.dialects.responses_writer import ResponsesWriter
from slipstream_gateway.errors import ApiError

EXAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 500
# What the SDK's types lack, and why it is sent all the same.
KNOWN = {
    ("Response", "store"): "Open Responses requires it",
    ("Response", "presence_penalty"): "Open Responses requires it",
    ("Response", "frequency_penalty"): "Open Responses requires it",
    ("ResponseErrorEvent", "error"): "the SDK raises errors only from this key",
    ("ResponseFunctionCallArgumentsDoneEvent", "name"): "older SDKs require it",
    ("LogprobTopLogprob", "bytes"): "part of the item's log probs",
    ("Logprob", "bytes"): "part of the item's log probs",
}
OPENAI_EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
ANTHROPIC_EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
SEEN: dict[str, int] = {}
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
BODY = {
    "input": "hi",
    "instructions": "be brief",
    "top_logprobs": 1,
    "tools": TOOLS,
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
}


def check_extras(model: object) -> None:
    """Raise if a model holds a field that its type does not have."""
    if isinstance(model, pydantic.BaseModel):
        unknown = {(type(model).__name__, name) for name in model.model_extra or ()}
        assert unknown <= set(KNOWN), unknown - set(KNOWN)
        for name in type(model).model_fields:
            check_extras(getattr(model, name))
    elif isinstance(model, list):
        for each in model:
            check_extras(each)


def validated(adapter: Any, payload: dict[str, Any]) -> Any:
    """Return a payload as its strictly checked type."""
    model = adapter.validate_json(json.dumps(payload), strict=True)
    check_extras(model)
    SEEN[payload["type"]] = SEEN.get(payload["type"], 0) + 1
    return model


def body_of(made: Made) -> dict[str, Any]:
    """Return a request; one in two asks for log probs."""
    return BODY if made.usage.prompt % 2 else {**BODY, "top_logprobs": None}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(answers(has_log_probs=True))
def responses(made: Made) -> None:
    """Fold with openai's `responses.stream`."""
    body = body_of(made)
    if body["top_logprobs"] is None:
        made.writes = [(deltas, []) for deltas, _ in made.writes]
    writer = ResponsesWriter(body, functions(body), "m", "0")
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    found = events(stream(writer, made))
    snapshot = None
    for payload in found:
        event = validated(OPENAI_EVENT, payload)
        state.handle_event(event)
        if payload["type"] in ("response.completed", "response.incomplete"):
            snapshot = state.accumulate_event(event)
    whole = json.loads(
        ResponsesWriter(body, functions(body), "m", "0").whole([made.whole], made.usage)
    )
    check_extras(Response.model_validate_json(json.dumps(whole), strict=True))
    last = found[-1]["response"]
    assert joined_log_probs(last["output"]) == joined_log_probs(whole["output"])
    assert last["output"] == whole["output"]
    assert last["usage"] == whole["usage"]
    text = "".join(
        part["text"]
        for item in whole["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    final = Response.model_validate(last)
    assert final.output_text == text
    accumulated = "".join(
        part.text for item in snapshot.output if item.type == "message" for part in item.content
    )
    assert accumulated == text
    arguments = [item.arguments for item in snapshot.output if item.type == "function_call"]
    assert arguments == [call.arguments for call in made.whole.calls]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(answers())
def messages(made: Made) -> None:
    """Fold with anthropic's `messages.stream`."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for payload in events(stream(MessagesWriter({}, "m", "0"), made)):
        if payload["type"] == "ping":  # which the SDK skips
            continue
        event = validated(ANTHROPIC_EVENT, payload)
        snapshot = accumulate_event(
            event=event, current_snapshot=snapshot, json_bufs=buffers, output_format=anthropic.omit
        )
    whole = MessagesWriter({}, "m", "0").whole([made.whole], made.usage)
    message = Message.model_validate_json(whole, strict=True)
    check_extras(message)
    wanted = message.to_dict(exclude_none=True)
    for block in wanted["content"]:
        block.pop("parsed_output", None)
    folded = snapshot.to_dict(exclude_none=True)
    for block in folded["content"]:
        block.pop("parsed_output", None)
    assert folded == wanted, (folded, wanted)


def errors() -> None:
    """Check errors of each status, as bodies and in mid-stream."""
    for status in (400, 401, 403, 404, 409, 413, 429, 500, 503, 504):
        error = ApiError(status, "no", "max_tokens")
        (last,) = events(MessagesWriter({}, "m").fail(error))
        kinds = set(get_args(anthropic.types.shared.ErrorType))
        if last["error"]["type"] != "request_too_large":  # sent by Anthropic, not in its types
            assert last["error"]["type"] in kinds
            ErrorResponse.model_validate(last)
        for payload in events(ResponsesWriter(BODY, [], "m").fail(error)):
            validated(OPENAI_EVENT, payload)


if __name__ == "__main__":
    responses()
    messages()
    errors()
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
    print(f"{EXAMPLES} drawn answers of each dialect: all events valid, folds equal the whole")
    for name, count in sorted(SEEN.items()):
        print(f"  {count:7d} {name}")
    for (kind, name), why in KNOWN.items():
        print(f"  beyond the types: {kind}.{name}: {why}")
