"""Requests as the tools that people use send them, recorded by load/sdks/record.py, sent again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.gateway.served import DONE, ROOT, Gateway, Response, make_repository, serving
from slipstream_gateway.dialects.openai_fields import CHAT, TABLES

SENT = Path(__file__).parents[1] / "fixtures" / "gateway" / "sent.jsonl"
ROWS = [json.loads(line) for line in SENT.read_text().splitlines()]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 6  # tokens: the form of an answer needs no more
MADE_UP = ("none_such",)  # by a check
TEMPLATE = ROOT / "load" / "sdks" / "hermes.jinja"


def _name(row: dict[str, Any]) -> str:
    fields = "+".join(name for name in row["body"] if name not in ("model", "temperature"))
    return f"{row['tool']}-{row['path'].strip('/')}-{row['status']}-{fields}"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Iterator[Gateway]:
    """A gateway whose model has tools, which `--reasoning-parser none` makes it call at once."""
    folder = tmp_path_factory.mktemp("sent")
    options = ["--chat-template", str(TEMPLATE), "--reasoning-parser", "none"]
    with serving(make_repository(folder, None), folder / "log", *options) as gateway:
        yield gateway
        assert "Traceback" not in gateway.log.read_text(), gateway.log.read_text()


def check_served(row: dict[str, Any], answer: Response) -> None:
    """The body is complete, of the kind that the request wants."""
    body = row["body"]
    if not body.get("stream"):
        value = answer.json
        assert value.get("choices") or value.keys() & {
            "output",
            "content",
            "input_tokens",
            "tokens",
        }
        return
    assert answer.headers["content-type"].startswith("text/event-stream")
    if row["path"].startswith(("/v1/messages", "/v1/responses")):
        last = answer.events[-1]["type"]
        assert last in ("message_stop", "response.completed", "response.incomplete")
        return
    finishes = [
        (choice["index"], choice["finish_reason"])
        for chunk in answer.chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(index for index, _ in finishes) == list(range(body.get("n") or 1))
    assert answer.events[-1] == DONE


@pytest.mark.rest
@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_a_recorded_request_gets_the_same_status_again(chatty, row):
    lengths = {name: MOST for name in LENGTHS if (row["body"].get(name) or 0) > MOST}
    answer = chatty.request("POST", row["path"], {**row["body"], **lengths}, row["headers"])
    assert answer.status == row["status"], answer.data
    if answer.status == 200:
        check_served(row, answer)
    else:
        assert answer.error["message"]
    if row["path"] in ("/v1/chat/completions", "/v1/completions"):
        ignored = json.loads(f"[{answer.headers.get('x-slipstream-ignored', '')}]")
        unknown = [name for name in ignored if name not in TABLES[CHAT]]
        assert unknown == [name for name in row["body"] if name in MADE_UP]


def test_a_prompt_that_is_too_long_says_so_in_openais_words(gateway):
    for answer in (gateway.chat("a " * 3000), gateway.complete(prompt="a " * 3000)):
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 2048 tokens." in answer.error["message"]
