"""Serve the endpoints that generate: from a body to an exchange with the engine."""

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
from slipstream import wire
from slipstream_contract import limits
from slipstream_contract.errors import ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_runtime import draining
from slipstream_runtime.directory import GATEWAY, Runtime
from slipstream_runtime.inflight import InFlight
from slipstream_runtime.vitals import remove_dead

from slipstream_gateway.body import GoneError, Receive, parse_object, read_body, wait_gone
from slipstream_gateway.dialects.dialect import Dialect
from slipstream_gateway.dialects.openai_fields import CHAT, COMPLETION, TABLES
from slipstream_gateway.errors import ApiError, api_error
from slipstream_gateway.exchange import Exchange, Shape
from slipstream_gateway.fields import read_whole
from slipstream_gateway.metrics import Metrics
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.models import Model, Models
from slipstream_gateway.prepare import Prepared, prepare_completion
from slipstream_gateway.prepare_chat import prepare_chat
from slipstream_gateway.reply import Reply
from slipstream_gateway.settings import MAX_PROMPTS, Settings
from slipstream_gateway.value_schemas import MAX_ID

_log = logging.getLogger(__name__)
_BUDGET = "thinking_token_budget"  # agents send one to any model
_STRANGE = 1 << 30  # bytes
_REQUIRED = ("messages", "prompt")  # errors name them although a body lacks them
_MAX_SHOWN = 20  # names in the header; then how many there are more
_MAX_LOGGED = 1000  # names, ever


class Arrival(NamedTuple):
    """When a request came, by `time.monotonic_ns()`, and the bytes of its body."""

    time_ns: int
    num_bytes: int


@runtime_checkable
class Counting(Protocol):
    """A dialect whose requests are counted, not answered."""

    def counted(self, prompt_tokens: int) -> bytes:
        """Return the body of the response."""


class Generator:
    """Serves requests of every dialect.

    Attributes:
        exchanges: those in flight.
        is_draining: no new request is taken.
    """

    def __init__(self, models: Models, settings: Settings, metrics: Metrics) -> None:
        self.exchanges: dict[Exchange, None] = {}
        self.is_draining = False
        self._runtime = Runtime(models.directory)
        file = self._runtime.in_flight(GATEWAY, os.getpid())
        remove_dead(file)
        self._in_flight = InFlight(file, "a drain does not wait for the gateway's requests")
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._known_unknown: set[str] = set()  # fields that were logged

    async def serve(
        self,
        dialect: Dialect,
        at: str,
        reply: Reply,
        receive: Receive,
        headers: Mapping[bytes, bytes],
    ) -> None:
        """Answer one request; return when its response is complete or its client has gone.

        `at`: CHAT for a dialect over chats, else COMPLETION.
        """
        self._in_flight.add(1)
        try:
            await self._serve(dialect, at, reply, receive, headers)
        finally:
            self._in_flight.add(-1)

    async def _serve(
        self,
        dialect: Dialect,
        at: str,
        reply: Reply,
        receive: Receive,
        headers: Mapping[bytes, bytes],
    ) -> None:
        arrival_ns = time.monotonic_ns()
        body: dict[str, Any] = {}
        try:
            data = await read_body(receive, headers, self._settings)
            body = parse_object(data)
            started = await self._start(dialect, at, reply, body, Arrival(arrival_ns, len(data)))
        except GoneError:
            return
        except ContractError as error:
            self._refuse(dialect, reply, api_error(error.with_traceback(None), {*body, *_REQUIRED}))
            return
        except ApiError as error:
            self._refuse(dialect, reply, error.with_traceback(None))
            return
        except Exception:
            _log.exception("a request could not be started")
            self._refuse(dialect, reply, ApiError(500, "the request could not be started"))
            return
        if isinstance(started, bytes):
            reply.respond(200, started)
            return
        await wait_gone(receive)
        started.abandon()

    def _refuse(self, dialect: Dialect, reply: Reply, error: ApiError) -> None:
        self._metrics.count_refusal(error)
        if not reply.is_started:
            reply.refuse(error, dialect.error(error))

    async def _start(
        self, dialect: Dialect, at: str, reply: Reply, given: dict[str, Any], arrival: Arrival
    ) -> Exchange | bytes:
        """Return the exchange, or the body of a response that needs no engine."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", retry_after_ms=1000)
        if draining.refuses(self._runtime):
            raise ApiError(503, draining.DRAINING, retry_after_ms=1000)
        body = dialect.to_chat(given) if at == CHAT else given
        TABLES[at].check(body)
        ignored = TABLES[at].ignored(body) + dialect.ignored(given)
        model, adapter = self._models.resolve(body.get("model"))
        text = model.ready_text()
        if adapter:
            if body.get("lora_name") not in (None, "", adapter):
                raise ApiError(
                    400, f"model is the adapter {adapter!r}, lora_name another one", "lora_name"
                )
            body = {**body, "lora_name": adapter}
        if read_whole(body, _BUDGET, 0, limits.INT32_MAX) is not None and not text.has_thinking:
            del body[_BUDGET]  # of a model that cannot think, or whose thinking has no end
            ignored.append(_BUDGET)
        self._note_ignored(reply, ignored)
        if not isinstance(dialect, Counting):
            model.engine.raise_if_full()
        prepared = await self._prepare(body, at, text, arrival.num_bytes)
        if isinstance(dialect, Counting):
            return dialect.counted(len(prepared.requests[0].token_ids))
        name = body.get("model") or model.names[0]
        request_id = _read_id(body)
        writer = dialect.writer({**given, "request_id": request_id}, name)
        is_search = prepared.requests[0].sampling.beams is not None
        block_size = model.config.block_size
        shape = Shape(prepared.is_streaming, prepared.per_prompt, block_size, is_search)
        exchange = Exchange(reply, dialect, writer, prepared.answers, shape, self._close)
        exchange.fields = body
        exchange.is_named_tool = prepared.is_named_tool
        submits = [
            _submit(model, request, f"{request_id}-{i}" if i else request_id, arrival.time_ns)
            for i, request in enumerate(prepared.requests)
        ]
        model.engine.raise_if_full(max(len(each.token_ids) for each in submits))
        exchange.engine = model.engine
        self.exchanges[exchange] = None
        try:
            model.engine.start(exchange, submits)
        except ContractError:
            del self.exchanges[exchange]
            raise
        self._metrics.start(at)
        return exchange

    async def _prepare(self, body: dict[str, Any], at: str, text: ModelText, size: int) -> Prepared:
        if at == COMPLETION:
            return await text.run(size, lambda: prepare_completion(body, text, MAX_PROMPTS))
        has_own = self._settings.has_request_templates
        if has_own and body.get("chat_template"):
            size = _STRANGE  # code of a stranger: never in this thread
        return await text.run(size, lambda: prepare_chat(body, text, has_own))

    def _note_ignored(self, reply: Reply, names: list[str]) -> None:
        """Name fields that have no effect in a header, and log each once."""
        if not names:
            return
        shown = ", ".join(json.dumps(name[:64]) for name in names[:_MAX_SHOWN])
        if len(names) > _MAX_SHOWN:
            shown += f", and {len(names) - _MAX_SHOWN} more"
        shown = shown.replace("\x7f", "\\u007f")  # JSON has it as it is, a header may not
        reply.add_header(b"x-slipstream-ignored", shown.encode("ascii"))
        for name in names:
            if name in self._known_unknown or len(self._known_unknown) == _MAX_LOGGED:
                continue
            self._known_unknown.add(name)
            _log.warning("requests have the field %.64r, which has no effect", name)
            if len(self._known_unknown) == _MAX_LOGGED:
                _log.warning("further fields without effect are not logged")

    def _close(self, exchange: Exchange, cause: wire.CancelCause | None) -> None:
        assert exchange.engine is not None
        exchange.engine.close_exchange(exchange, cause)
        self.exchanges.pop(exchange, None)
        self._metrics.finish(exchange)

    def tick(self, now_s: float) -> None:
        """Send comments on silent streams; end those whose clients do not read."""
        settings = self._settings
        for exchange in list(self.exchanges):
            paused_s = exchange.times.paused_s
            if paused_s and now_s - paused_s > settings.stall_s:
                exchange.abandon()
            else:
                exchange.keep_alive(now_s, settings.quiet_s)

    def why_unready(self) -> str:
        """Return why no new request should come; empty: they may."""
        if self.is_draining:
            return "the server is stopping"
        return draining.DRAINING if draining.has_started(self._runtime) else ""

    def fail_all(self, error: ApiError) -> None:
        """End everything in flight with an error."""
        for exchange in list(self.exchanges):
            exchange.fail(error)


def _read_id(body: Mapping[str, Any]) -> str:
    given = body.get("request_id")
    if given is None:
        return secrets.token_hex(12)
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID:
        message = f"request_id is {given!r:.64}, not a text of 1 to {MAX_ID} characters"
        raise ApiError(400, message, "request_id")
    return given


def _submit(
    model: Model, request: GenerateRequest, request_id: str, arrival_ns: int
) -> wire.Submit:
    sampling, urgency = request.sampling, request.urgency
    if sampling.seed is None:  # chosen here, so that another engine would start with the same
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(64))
    deadline_ns = arrival_ns + urgency.timeout_ns if urgency.timeout_ns else 0
    return wire.Submit(
        model.engine.next_number(),
        request.token_ids,
        sampling,
        arrival_ns,
        urgency.priority,
        deadline_ns,
        urgency.timeout_ns,
        request_id,
        "openai",
        request.cache_salt,
        request.retention,
        is_streaming=request.options.is_streaming and sampling.beams is None,
        adapter=request.adapter,
    )
