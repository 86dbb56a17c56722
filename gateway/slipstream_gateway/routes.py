"""The endpoints that do not generate: models, tokens, health, versions, metrics."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from slipstream import __version__, wire
from slipstream_contract.errors import ContractError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream_gateway.adapter_routes import load_adapter, unload_adapter
from slipstream_gateway.body import GoneError, parse_object, read_body
from slipstream_gateway.errors import ApiError, api_error, openai_body
from slipstream_gateway.fields import read_flag
from slipstream_gateway.history import prepare_messages
from slipstream_gateway.metrics import Metrics, adapter_counts
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.models import Model, Models
from slipstream_gateway.openapi import FILE
from slipstream_gateway.prepare_chat import render
from slipstream_gateway.settings import Settings

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
_MAX_IDS = 1 << 20
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def json_response(value: object) -> Response:
    """Return a response of status 200 with a JSON body."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return an error in OpenAI's shape."""
    headers = {}
    if error.retry_after_ms is not None:
        seconds = max(1, -(-error.retry_after_ms // 1000))
        headers = {"retry-after-ms": str(error.retry_after_ms), "retry-after": str(seconds)}
    return Response(openai_body(error), error.status, headers, "application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """Return what routing refuses, such as an unknown path, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return error_response(ApiError(404, f"{path[:128]} is not served", code="not_found"))
    message = f"{request.method} is not served at {path[:128]}"
    response = error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})  # `Allow`
    return response


class Routes:
    """Handlers of the small endpoints."""

    def __init__(
        self, models: Models, settings: Settings, metrics: Metrics, why_unready: Callable[[], str]
    ) -> None:
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._why_unready = why_unready

    def all(self) -> list[Route]:
        """Return the routes."""
        get = (
            ("/v1/models", self.list_models),
            ("/v1/models/{name:path}", self.show_model),
            ("/health", self.health),
            ("/v1/health", self.health),
            ("/ready", self.ready),
            ("/version", self.version),
            ("/load", self.load),
            ("/metrics", self.show_metrics),
            ("/tokenizer_info", self.tokenizer_info),
            ("/openapi.json", self.openapi),
        )
        post = (
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/v1/embeddings", self.embeddings),
            ("/v1/load_lora_adapter", self.load_adapter),
            ("/v1/unload_lora_adapter", self.unload_adapter),
        )
        return [
            *(Route(path, _guarded(handler), methods=["GET"]) for path, handler in get),
            *(Route(path, _guarded(handler), methods=["POST"]) for path, handler in post),
            Route("/ping", _guarded(self.ping), methods=["GET", "POST"]),
        ]

    # --- models ---------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        """List all names by which requests reach a model now; 503 if none is up."""
        shown = [_card(model, name) for model, name in self._models.served()]
        return json_response({"object": "list", "data": shown})

    async def show_model(self, request: Request) -> Response:
        """Show one name."""
        name = request.path_params["name"]
        if not name:
            raise ApiError(404, "/v1/models/ is not served, /v1/models is", None, "not_found")
        model = self._models.find(name)
        model.check_engine()
        return json_response(_card(model, name))

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter under a name, which may have one already."""
        return json_response(await load_adapter(self._models, await self._body(request)))

    async def unload_adapter(self, request: Request) -> Response:
        """Discard an adapter's name."""
        return json_response(await unload_adapter(self._models, await self._body(request)))

    async def embeddings(self, request: Request) -> Response:
        """Refuse: no engine here has a pooling model."""
        body = await self._body(request)
        self._models.find(body.get("model"))
        raise ApiError(
            400,
            "embeddings need a pooling model, such as a BERT or an embedding variant of Qwen3; the "
            "models of this server generate text",
            "model",
            "unsupported_model",
        )

    # --- tokens ---------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, or of messages."""
        body = await self._body(request)
        text = self._models.find(body.get("model")).ready_text()
        ids = await text.run(_size(request), lambda: _token_ids(body, text))
        answer: dict[str, object] = {
            "count": len(ids),
            "max_model_len": text.max_model_len,
            "tokens": ids,
        }
        if read_flag(body, "return_token_strs"):
            answer["token_strs"] = [text.token_texts.of(each)[0] for each in ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._body(request)
        text = self._models.find(body.get("model")).ready_text()
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise ApiError(400, f"tokens is {ids!r:.64}, not a list of token ids", "tokens")
        if len(ids) > _MAX_IDS:
            message = f"tokens has {len(ids)} ids, at most {_MAX_IDS} are served"
            raise ApiError(400, message, "tokens")
        text.check_ids("tokens", ids)
        shown = await text.run(_size(request), lambda: text.decode(ids))
        return json_response({"prompt": shown})

    async def tokenizer_info(self, request: Request) -> Response:
        """Return the tokenizer's configuration, and the template that chats use."""
        text = self._models.find(request.query_params.get("model")).ready_text()
        path = text.checkpoint / "tokenizer_config.json"
        info: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        info["max_model_len"] = text.max_model_len
        source = text.chat.source("default")
        if source:
            info["chat_template"] = source
        return json_response(info)

    async def openapi(self, request: Request) -> Response:
        """Return the description of all endpoints."""
        return Response(FILE.read_bytes(), 200, media_type="application/json")

    # --- health ---------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Return 200 if every engine answers now, else 503 and what is wrong."""
        faults = [fault for model in self._models.all if (fault := await _fault(model))]
        if why := self._why_unready():
            faults.append(why)
        if faults:
            return error_response(ApiError(503, "; ".join(faults), retry_after_ms=1000))
        return Response(b"", 200)

    async def ready(self, request: Request) -> Response:
        """Return what `health` does."""
        return await self.health(request)

    async def ping(self, request: Request) -> Response:
        """Return 200: this process is alive."""
        return Response(b"", 200)

    async def version(self, request: Request) -> Response:
        """Return the version."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Return how many requests are in flight here."""
        return json_response({"server_load": self._metrics.num_open})

    async def show_metrics(self, request: Request) -> Response:
        """Return metrics in Prometheus' text format; with `adapters` counts of each adapter."""
        models = self._models.all
        if read_query_flag(request, "adapters"):
            counted = await asyncio.gather(*map(_counted, models))
            return Response(adapter_counts(counted), media_type=_PLAIN)
        await asyncio.gather(*(_fault(model) for model in models))  # asks each for its status
        rows = [(m.names[0], m.config.block_size, m.engine.connection.status) for m in models]
        page = self._metrics.page(rows)
        return Response(page, media_type=_PLAIN)

    async def _body(self, request: Request) -> dict[str, Any]:
        headers: Mapping[bytes, bytes] = dict(request.scope["headers"])
        return parse_object(await read_body(request.receive, headers, self._settings))


def _size(request: Request) -> int:
    """Return the bytes of a body as its header has them; a body in chunks counts as long."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdigit() else 1 << 20


def _token_ids(body: Mapping[str, Any], text: ModelText) -> list[int]:
    if body.get("messages") is not None:
        prompt = render(body, prepare_messages(body["messages"]), text.chat)
        return text.encoder.encode(prompt, read_flag(body, "add_special_tokens"), "messages")
    given = body.get("prompt")
    if not isinstance(given, str):
        raise ApiError(400, f"prompt is {given!r:.64}, not a text", "prompt")
    return text.encoder.encode(given, read_flag(body, "add_special_tokens", True), "prompt")


def _card(model: Model, name: str) -> dict[str, object]:
    """Return a model, or an adapter of it, as `/v1/models` lists it."""
    adapter = None if name in model.names else (model.adapters or {}).get(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "slipstream",
        "root": model.names[0] if adapter is None else adapter.path,
        "parent": None if adapter is None else model.names[0],
        "max_model_len": None if model.text is None else model.text.max_model_len,
        "has_chat_template": None if model.text is None else model.text.can_chat,
        "permission": [],
    }


def read_query_flag(request: Request, name: str) -> bool:
    """Return a flag of the query. Raises ApiError if it is neither true nor false."""
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise ApiError(400, f"{name} is {value!r:.64}, neither true nor false", name)
    return value == "true"


async def _counted(model: Model) -> tuple[str, wire.Status | None]:
    """Return a model's name and its engine's status, with counts of adapters."""
    ask = model.engine.connection.request_status
    status = await asyncio.to_thread(ask, _ANSWER_S, with_adapters=True)
    return model.names[0], status


async def _fault(model: Model) -> str:
    """Return why a model cannot generate now; empty: it can."""
    try:
        model.ready_text()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, model.engine.connection.request_status, _ANSWER_S)
    except ContractError as error:
        return f"{model.names[0]}: {error.message}"
    return ""


def _guarded(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler whose errors are responses."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except ContractError as error:
            return error_response(api_error(error, ("prompt", "messages", "tokens")))
        except GoneError:
            return Response(b"", 400)
        except Exception:
            _log.exception("a request to %s could not be served", request.url.path)
            return error_response(ApiError(500, "the request could not be served"))

    return guarded
