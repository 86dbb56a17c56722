"""The OpenAPI file and the table of the documents are those of the code."""

import json
import re
from functools import cache
from typing import Any

import pytest
from fixtures.gateway.served import MODEL, ROOT, Gateway
from slipstream_gateway import openapi
from slipstream_gateway.app import GENERATE
from slipstream_gateway.dialects import openai_fields

jsonschema = pytest.importorskip("jsonschema")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SENT = ROOT / "tests" / "fixtures" / "gateway" / "sent.jsonl"
USER = {"role": "user", "content": "a"}


@cache
def bodies_of(path: str) -> Any:
    document = json.loads(openapi.FILE.read_bytes())
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return jsonschema.Draft202012Validator({**document, **content["schema"]})


def test_what_tools_send_is_valid():
    rows = [json.loads(line) for line in SENT.read_text().splitlines()]
    assert len(rows) > 50
    for row in rows:
        if row["status"] == 200 and row["path"] in GENERATE:
            wrong = [error.message for error in bodies_of(row["path"]).iter_errors(row["body"])]
            assert not wrong, (row["tool"], row["path"], wrong)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((COMPLETION, {"prompt": prompt}) for prompt in ("", [], [[]], [""], ["a", 3], [-1], 7)),
        (COMPLETION, {"prompt": "a", "logprobs": True}),
        (COMPLETION, {"prompt": "a", "top_p": 0}),
        (COMPLETION, {"prompt": "a", "logit_bias": {"1": 101}}),
        (COMPLETION, {"prompt": "a", "stop": [""]}),
        (COMPLETION, {"prompt": "a", "request_id": ""}),
        (COMPLETION, {"prompt": "a", "response_format": {"type": "xml"}}),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": []}}),
        *((CHAT, {"messages": [message]}) for message in ({}, {"role": "wizard"}, 3)),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [USER], "logprobs": 2}),
        (CHAT, {"messages": [USER], "tool_choice": "zz"}),
        (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}),
        ("/v1/responses", {"model": MODEL, "input": []}),
        ("/v1/responses", {"model": MODEL, "input": "a", "thinking_token_budget": 1 << 31}),
        (
            "/v1/messages",
            {"model": MODEL, "max_tokens": 1, "messages": [USER], "chat_template_kwargs": [None]},
        ),
        *((CHAT, {"messages": [{"role": role}]}) for role in ("tool", "user", "system")),
        *((CHAT, {"messages": [{**USER, "videos": value}]}) for value in ({}, 0, ["a"])),
        (CHAT, {"messages": [{**USER, "tool_calls": {}}]}),
        (CHAT, {"messages": [USER], "max_tokens": 0}),
        (CHAT, {"messages": [USER], "max_completion_tokens": 0}),
        *(
            (CHAT, {"messages": [USER], "structured_outputs": value})
            for value in ([], 0, {"structural_tag": ""}, {"regex": ""}, {"backend": "a"})
        ),
        (CHAT, {"messages": [USER], "tool_choice": {"type": "allowed_tools"}}),
        *(
            ("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": messages})
            for messages in ([], [{}], [{"content": "a"}], [{"role": "tool", "content": "a"}])
        ),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_what_is_never_served_is_invalid(gateway: Gateway, path: str, body: dict[str, Any]):
    assert gateway.post(path, body).status == 400
    assert not bodies_of(path).is_valid(body)


def test_an_empty_text_is_an_input(gateway: Gateway):
    body = {"model": MODEL, "input": "", "max_output_tokens": 1}
    assert gateway.post("/v1/responses", body).status == 200
    assert bodies_of("/v1/responses").is_valid(body)


def test_the_file_is_made_from_the_tables():
    assert openapi.FILE.read_bytes() == openapi.file_bytes(), "make fields"


def test_the_table_of_the_page_is_the_code():
    assert openai_fields.markdown() in (ROOT / "docs" / "openai.md").read_text(), "make fields"


def test_every_reference_leads_somewhere():
    document = json.loads(openapi.FILE.read_bytes())
    names = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', openapi.FILE.read_text())
    assert names
    assert set(names) <= document["components"]["schemas"].keys()
    assert "$defs" not in openapi.FILE.read_text()


def test_every_endpoint_is_served_and_described(gateway: Gateway):
    document = gateway.get("/openapi.json").json
    assert document == json.loads(openapi.FILE.read_bytes())
    assert document["paths"].keys() >= GENERATE.keys()
    for path, methods in document["paths"].items():
        for method in methods:
            found = gateway.request(method.upper(), path.replace("{model}", "ensemble"), {})
            assert found.status not in (404, 405, 500), (path, found.data)
