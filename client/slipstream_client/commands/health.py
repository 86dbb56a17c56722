"""`slipstream health`: exit code 0 only if tokens can be had now.

Triton's own readiness stays good when a model's process or the engine has died or hangs. So the
command sends each model a request that its process answers without the engine, and reads the
engine's state. A busy engine is healthy, however loaded; an idle one must generate a token.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
from slipstream_contract.deployment import (
    name_of,
    role_of,
    split_name,
    text_model_of,
)
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.probes import PROBE, Probe
from slipstream_contract.tensors import LLMAPI, MODELS
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.client import DEFAULT_MODEL, SlipstreamClient
from slipstream_client.codec import (
    GENERATING,
    TENSORRT_LLM,
    health_model_of,
    request_of,
)
from slipstream_client.commands.common import add_connection, connect
from slipstream_client.failures import error_from_rpc, error_from_text

EXIT_UNHEALTHY = 1
_AT_ONCE_S = 0.5
_STAGES = ("preprocessing", "postprocessing")
_WIRE_VALUES: dict[str, tuple[list[int], bytes]] = {
    "QUERY": ([1, 1], b"\x01\x00\x00\x00a"),
    "REQUEST_OUTPUT_LEN": ([1, 1], b"\x01\x00\x00\x00"),
    "TOKENS_BATCH": ([1, 1, 1], b"\x00\x00\x00\x00"),
    "SEQUENCE_LENGTH": ([1, 1], b"\x01\x00\x00\x00"),
}
"""The smallest request for a stage: shape and bytes of each required tensor."""
_OF_REPLICA = {
    "engine_pid": "engine_pid",
    "is_up": "up",
    "running": "running",
    "waiting": "waiting",
    "kv_blocks_free": "kv_blocks_free",
    "kv_blocks_total": "kv_blocks_total",
    "num_requests": "requests",
    "num_restarts": "restarts",
}
"""What is printed of a replica, and the heads of the columns."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("health", help="exit code 0 only if tokens can be had now")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="the deployment, by any of its models (%(default)s)"
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="a server that drains counts as healthy: what must not be restarted",
    )
    add_connection(parser, timeout_s=3.0)


def run(args: argparse.Namespace) -> int:
    """Print the engine's state; return 0 if all is well, else 1."""
    with connect(args) as client:
        report = health_report(client, args.timeout, args.live)
    if args.json:
        print(json.dumps(report))
        return 0 if report["ok"] else EXIT_UNHEALTHY
    error = report.pop("error", None)
    for line in lines_of(report):
        print(line)
    if error is not None:
        print(f"slipstream: {error}", file=sys.stderr)
    return 0 if report["ok"] else EXIT_UNHEALTHY


def lines_of(report: dict[str, Any]) -> list[str]:
    """Return a report as lines for people: a fact each, and a table of the replicas, if any."""
    facts = report.get("about", {}) | {k: x for k, x in report.items() if k != "about"}
    replicas = facts.pop("replicas", [])
    width = max(map(len, facts), default=0)
    lines = [f"{name:{width}} {'-' if value is None else value}" for name, value in facts.items()]
    return lines + _table(replicas)


def _table(replicas: list[dict[str, Any]]) -> list[str]:
    """Return replicas as a table, a line each below the names of their facts."""
    if not replicas:
        return []
    rows = [["replica", *_OF_REPLICA.values()]]
    for each in replicas:
        cells = each | {"is_up": "yes" if each.get("is_up") else "no"}
        rows.append([str(cells.get(key, "-")) for key in ("number", *_OF_REPLICA)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def health_report(
    client: SlipstreamClient, timeout_s: float, is_draining_fine: bool = False
) -> dict[str, Any]:
    """Return the engine's state, `ok`, and `error`, or `token_s` of one token if it is idle.

    The engine is that of the client's model. A request reaches one of a model's processes; the
    readiness of the server covers the others. Takes about `timeout_s` at most.
    """
    deadline = time.monotonic() + timeout_s
    state: dict[str, Any] = {}
    try:
        with grpc.insecure_channel(client.url) as channel:
            prober = _Prober(service_pb2_grpc.GRPCInferenceServiceStub(channel), client, deadline)
            models = prober.ready_models()
            with ThreadPoolExecutor(len(models) + 1) as threads:
                health = threads.submit(_state, client, deadline)
                answers = {name: threads.submit(prober.probe, name) for name in models}
                state = health.result()
                for name, answer in answers.items():
                    _raise_named(name, answer)
        faults = state.pop("faults", ())
        if faults:
            raise ContractError("; ".join(faults), Code.UNAVAILABLE)
        if state.get("is_draining") and not is_draining_fine:
            raise ContractError("the server is draining", Code.UNAVAILABLE)
        if state["running"] or state["waiting"]:
            return {"ok": True, **state}
        seconds = _seconds_per_token(client, models, deadline)
        return {"ok": True, **state} | ({} if seconds is None else {"token_s": round(seconds, 4)})
    except (ContractError, TimeoutError) as error:
        return {"ok": False, **state, "error": str(error)}


def _state(client: SlipstreamClient, deadline: float) -> dict[str, Any]:
    """Return the engine's state; retries until the deadline while a long step runs.

    Raises ContractError, or RequestTimeoutError if the server itself does not answer.
    """
    said: ContractError | None = None
    while True:
        start = time.monotonic()
        try:
            return client.health(max(0.001, deadline - start))
        except ContractError as error:
            if time.monotonic() - start < _AT_ONCE_S:
                raise  # refused at once: there is no engine
            said = error
        except TimeoutError:
            raise said or ContractError(
                f"model {health_model_of(client.model)} does not answer", Code.UNAVAILABLE
            ) from None


class _Prober:
    """Sends requests to the models of one deployment, within one deadline for all."""

    def __init__(self, stub: Any, client: SlipstreamClient, deadline: float) -> None:
        self._stub = stub
        self._url = client.url
        self._deployment = split_name(client.model)[0]
        self._deadline = deadline

    def ready_models(self) -> list[str]:
        """Return our models that are ready. Raises ContractError if none of them generates."""
        names = [name_of(self._deployment, role) for role in (*MODELS, LLMAPI.name)]
        requests = {name: service_pb2.ModelReadyRequest(name=name) for name in names}
        ready = [n for n, each in requests.items() if self._call(self._stub.ModelReady, each).ready]
        if not GENERATING.keys() & set(map(role_of, ready)):
            which = "ours" if self._deployment == DEFAULT_MODEL else self._deployment
            raise ContractError(
                f"no model of {which} is loaded at {self._url}; --model names a deployment",
                Code.UNAVAILABLE,
            )
        return ready

    def probe(self, name: str) -> None:
        """Wait for the model's process to answer. Raises ContractError, RequestTimeoutError."""
        role = role_of(name)
        if role in _STAGES:
            request = service_pb2.ModelInferRequest(model_name=name)
            for tensor in MODELS[role].inputs:
                if tensor.name in _WIRE_VALUES:
                    shape, data = _WIRE_VALUES[tensor.name]
                    kind = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
                    request.inputs.add(name=tensor.name, datatype=kind, shape=shape)
                    request.raw_input_contents.append(data)
            self._call(self._stub.ModelInfer, request)
        elif role in GENERATING:
            contract = self._contract(name)
            prompt: Any = [0] if contract == TENSORRT_LLM else "a"
            request = request_of(contract, prompt, {"max_tokens": 1}, "")
            request.model_name = name
            request.parameters[PROBE].bool_param = True
            self._call(self._stream, [request])

    def _contract(self, name: str) -> str:
        """Return the role that a model speaks like: `tensorrt_llm` may be NVIDIA's newer one."""
        role = role_of(name)
        if role != TENSORRT_LLM:
            return role
        metadata = self._call(self._stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=name))
        takes_ids = any(tensor.name == "input_ids" for tensor in metadata.inputs)
        return role if takes_ids else LLMAPI.name

    def _stream(self, requests: Any, timeout: float) -> None:
        for response in self._stub.ModelStreamInfer(requests, timeout=timeout):
            if response.error_message:
                raise error_from_text(response.error_message)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            remaining_s = max(0.001, self._deadline - time.monotonic())
            return method(
                iter(request) if isinstance(request, list) else request, timeout=remaining_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._url) from None


def _raise_named(name: str, answer: "Future[None]") -> None:
    try:
        answer.result()
    except TimeoutError:
        raise ContractError(f"model {name} does not answer", Code.UNAVAILABLE) from None
    except ContractError as error:
        raise ContractError(f"model {name}: {error.message}", error.code) from None


def _seconds_per_token(
    client: SlipstreamClient, models: list[str], deadline: float
) -> float | None:
    """Return the seconds for one token of the first text model; None if the engine got work.

    Raises ContractError or RequestTimeoutError if there was no token.
    """
    roles = {role_of(model): model for model in models}
    model = text_model_of(roles) or roles[TENSORRT_LLM]
    prompt: Any = [0] if role_of(model) == TENSORRT_LLM else "a"
    start = time.monotonic()
    remaining_s = max(0.001, deadline - start)
    try:
        parameters: dict[str, Any] = {"max_tokens": 1, PROBE: Probe.TOKEN}
        completion = client.complete(prompt, model=model, timeout_s=remaining_s, **parameters)
    except (ContractError, TimeoutError):
        state = client.health(1.0)
        if state["running"] + state["waiting"] > 1 and state["last_step_age_s"] < remaining_s:
            return None  # other requests arrived meanwhile, and steps run
        raise
    if completion.num_output_tokens[0] is None:
        raise ContractError(f"{model} answered without a token", Code.INTERNAL)
    return time.monotonic() - start
