"""The description of all endpoints as an OpenAPI document, made from the tables of fields."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream_contract import limits

from slipstream_gateway import value_schemas as values
from slipstream_gateway.dialects.messages_fields import COUNTED
from slipstream_gateway.dialects.messages_fields import TABLE as MESSAGES
from slipstream_gateway.dialects.openai_fields import CHAT, COMPLETION, TABLES
from slipstream_gateway.dialects.responses_fields import TABLE as RESPONSES
from slipstream_gateway.fields import Table

Schema = dict[str, Any]

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OBJECT: Schema = {"type": "object"}
_STATUSES = {
    "400": "a field is wrong, or is not served",
    "401": "no key, or a wrong one",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too long",
    "415": "the body is compressed",
    "429": "the engine is full; see retry-after-ms",
    "500": "a fault of the server",
    "503": "there is no engine now; see retry-after-ms",
    "504": "timeout_ms has passed",
}


def _nullable(schema: Mapping[str, Any]) -> Schema:
    return {"anyOf": [dict(schema), {"type": "null"}]} if schema else {}


def _content(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _responses(is_streamed: bool = False, is_generated: bool = True) -> Schema:
    content = _content(_OBJECT)
    if is_streamed:
        content |= _content({"description": "server-sent events"}, "text/event-stream")
    found: Schema = {"200": {"description": "the answer", "content": content}}
    for status, text in _STATUSES.items():
        if is_generated or status in ("400", "401", "404", "408", "413", "415", "503"):
            found[status] = {"description": text, "content": _content(_OBJECT)}
    return found


def _post(name: str, summary: str, body: Schema, is_streamed: bool = False) -> Schema:
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": _content(body)},
            "responses": _responses(is_streamed),
        }
    }


def _get(name: str, summary: str, kind: str = "application/json") -> Schema:
    responses: Schema = {
        "200": {"description": summary, "content": _content({}, kind)},
        "401": {"description": _STATUSES["401"], "content": _content(_ERROR)},
        "503": {"description": _STATUSES["503"], "content": _content(_ERROR)},
    }
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _probe(name: str, summary: str) -> Schema:
    """Return an endpoint whose answer is its status alone."""
    found = _get(name, summary)
    del found["get"]["responses"]["200"]["content"]
    return found


def _tokenize() -> Schema:
    shared = {"model": _nullable({"type": "string"})}
    flag = _nullable({"type": "boolean"})
    prompt: Schema = {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            **shared,
            "prompt": {"type": "string", "minLength": 1},
            "add_special_tokens": flag,
            "return_token_strs": flag,
        },
    }
    chat: Schema = {
        "type": "object",
        "required": ["messages"],
        "properties": {
            **shared,
            "messages": TABLES[CHAT]["messages"].schema,
            "return_token_strs": flag,
        },
    }
    return {"anyOf": [prompt, chat]}


def _detokenize() -> Schema:
    tokens = values.listed(values.TOKEN, 0, limits.MAX_DETOKENIZED)
    model = _nullable(values.TEXT)
    return {**values.keyed({"model": model, "tokens": tokens}, "tokens")}


def _adapter(*more: str) -> Schema:
    named = dict.fromkeys(("lora_name", *more), values.TEXT)
    return {**values.keyed({"model": _nullable(values.TEXT), **named}, *named)}


def document() -> Schema:
    """Return the document."""
    schemas: dict[str, Schema] = {}
    responses = _schema("Responses", RESPONSES, schemas)
    messages = _schema("Messages", MESSAGES, schemas)
    counted = _schema("Counted", COUNTED, schemas)
    model = _get("showModel", "one model")
    model["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    model["get"]["responses"]["404"] = {
        "description": _STATUSES["404"],
        "content": _content(_ERROR),
    }
    posts = (
        ("/v1/chat/completions", "chat", "a chat completion", TABLES[CHAT].schema(), True),
        ("/v1/completions", "complete", "a completion", TABLES[COMPLETION].schema(), True),
        ("/v1/responses", "respond", "a response, without state", responses, True),
        ("/v1/messages", "message", "Anthropic's messages", messages, True),
        ("/v1/messages/count_tokens", "countTokens", "the prompt's tokens", counted, False),
        ("/tokenize", "tokenize", "the tokens of a prompt, or of messages", _tokenize(), False),
        ("/detokenize", "detokenize", "the text of tokens", _detokenize(), False),
        ("/v1/load_lora_adapter", "loadAdapter", "load an adapter", _adapter("lora_path"), False),
        ("/v1/unload_lora_adapter", "unloadAdapter", "discard an adapter", _adapter(), False),
    )
    gets = (
        ("/v1/models", "listModels", "all models"),
        ("/version", "version", "the version"),
        ("/load", "load", "requests in flight"),
        ("/tokenizer_info", "tokenizerInfo", "the tokenizer's configuration"),
    )
    ping = _probe("ping", "200 if this process lives")
    ping["post"] = {**ping["get"], "operationId": "pingByPost"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            **{path: _post(name, text, body, flag) for path, name, text, body, flag in posts},
            **{path: _get(name, text) for path, name, text in gets},
            "/health": _probe("health", "200 if tokens can be had now"),
            "/ready": _probe("ready", "the same"),
            "/ping": ping,
            "/metrics": _get("metrics", "metrics in Prometheus' format", "text/plain"),
            "/v1/models/{model}": model,
        },
    }


def _schema(prefix: str, table: Table, schemas: dict[str, Schema]) -> Schema:
    """Return the schema of a table; its definitions move to `schemas`, under a prefix."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        for name, definition in value.get("$defs", {}).items():
            schemas[f"{prefix}{name}"] = moved(definition)
        kept = {name: moved(each) for name, each in value.items() if name != "$defs"}
        if isinstance(ref := kept.get("$ref"), str):
            kept["$ref"] = f"#/components/schemas/{prefix}{ref.rpartition('/')[2]}"
        return kept

    found: Schema = moved(table.schema())
    return found


def file_bytes() -> bytes:
    """Return the text of `openapi.json`, beside this module: `make fields` writes it."""
    return (json.dumps(document(), indent=1, ensure_ascii=False) + "\n").encode()


FILE = Path(__file__).with_name("openapi.json")
