"""Run in the stub of every model of backend `slipstream`: Triton's entry points."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import triton_python_backend_utils as pb
from slipstream_contract.deployment import deployments_of, engine_model_of
from slipstream_contract.errors import ContractError
from slipstream_contract.inputs import read_parameters, refuse_others
from slipstream_contract.limits import check_request_id
from slipstream_contract.parameters import StageParameters
from slipstream_contract.paths import local_path, text_of
from slipstream_contract.probes import PROBE, Probe, split_probe
from slipstream_contract.shares import memory_share
from slipstream_contract.vocab import TokenBytes
from slipstream_runtime.directory import hide_shared_memory, open_runtime
from slipstream_runtime.inflight import InFlight
from slipstream_runtime.stub import (
    close_inherited,
    quicken_bytes,
    rest_collector,
    share_interpreter,
)
from slipstream_runtime.vitals import Vitals
from slipstream_runtime.waking import wake_gently

from slipstream import wire
from slipstream.bridge.bridge import Bridge, IncomingRequest
from slipstream.bridge.composed import Composed, Vocabulary
from slipstream.bridge.ending import EndWatch
from slipstream.bridge.fused import Fused
from slipstream.bridge.health import About, Siblings, health
from slipstream.bridge.llmapi import LlmApi
from slipstream.bridge.metrics import Metrics
from slipstream.bridge.text import Text, load_end_ids
from slipstream.bridge.triton import (
    TritonReply,
    make_tensors,
    read_inputs,
    triton_error,
)
from slipstream.bridge.vllm import Vllm
from slipstream.config import EngineConfig

_log = logging.getLogger(__name__)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `1/model.json`. One model has the engine's settings, the others name it."""

    wiring: str
    engine: EngineConfig | None = None
    engine_of: str | None = None


class Wiring(Protocol):
    """The meaning of a model's tensors."""

    def start(self, incoming: IncomingRequest) -> None:
        """Start a request, which answers by itself from then on. Raises ContractError."""

    def close(self) -> None:
        """Free what the wiring has besides the bridge."""


class TritonPythonModel:
    """A served model. `1/model.json` selects its tensors."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine if none runs, and wait for it. Raises what keeps it from starting."""
        logging.basicConfig(
            level=logging.INFO,
            stream=sys.stderr,
            format=f"%(asctime)s {args['model_name']} %(levelname)s %(message)s",
        )
        hide_shared_memory()
        close_inherited()
        wake_gently()
        quicken_bytes(pb)
        share_interpreter()
        parameters = StageParameters(args)
        wiring, config = read_settings(parameters.version_directory)
        self._is_decoupled = bool(
            parameters.config.get("model_transaction_policy", {}).get("decoupled")
        )
        self._outputs = [output["name"] for output in parameters.config["output"]]
        server_pid = os.getppid()
        runtime = open_runtime(server_pid, parameters.engine_model)
        self._in_flight = InFlight(runtime.in_flight(parameters.model, os.getpid()))
        self._bridge = Bridge(parameters.model, runtime, config, server_pid)
        try:
            welcome = self._bridge.wait()
            self._wiring = self._make_wiring(wiring, parameters, config, welcome)
        except BaseException:
            self._bridge.close()
            raise
        self._vitals = Vitals(runtime.vitals(parameters.model, os.getpid()))
        self._metrics = self._make_metrics(parameters.model)
        self._end_watch = self._siblings = None
        if self._wiring is None:
            self._end_watch = EndWatch(runtime, server_pid)
            self._siblings = Siblings(runtime, partial(_uses_engine, parameters))
            self._about = About.of(parameters.engine_model, config, welcome)
        rest_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Start every request; never waits for a token."""
        if self._siblings is not None:
            return self._report(requests, self._siblings)
        for request in requests:
            reply = TritonReply(request, self._in_flight, self._is_decoupled)
            start = partial(self._start, request, reply)
            self._vitals.start()
            self._bridge.answer(reply, start)
            self._vitals.finish()
        return None

    def finalize(self) -> None:
        """End all threads and connections; the engine goes on for the other models."""
        if self._end_watch is not None:
            self._end_watch.close()
        if self._siblings is not None:
            self._siblings.close()
        if self._metrics is not None:
            self._metrics.close()
        self._bridge.close()
        if self._wiring is not None:
            self._wiring.close()
        self._vitals.close()

    def _start(self, request: Any, reply: TritonReply) -> None:
        assert self._wiring is not None
        now_ns = time.monotonic_ns()
        probe, given = split_probe(read_parameters(request))
        if probe is not Probe.NONE:
            reply.mark_probe()
        if probe is Probe.PROCESS:
            self._bridge.calls.probes.num_calls += 1
            reply.end()
            return
        check_request_id(request.request_id())
        self._wiring.start(
            IncomingRequest(
                read_inputs(request),
                {"timeout": request.timeout()} | given,
                request.request_id(),
                reply,
                reply.requested,
                now_ns,
            )
        )

    def _make_metrics(self, model: str) -> Metrics | None:
        try:
            return Metrics(self._bridge, model, is_engine=self._wiring is None)
        except Exception as error:  # `--allow-metrics=false`
            _log.warning("no metrics: %s", error)
            return None

    def _report(self, requests: Sequence[Any], siblings: Siblings) -> list[Any] | None:
        responses = []
        for request in requests:
            try:
                refuse_others(read_parameters(request), (PROBE,))
                outputs = health(self._bridge, siblings, self._about, self._outputs[0])
                responses.append(pb.InferenceResponse(make_tensors(outputs)))
            except ContractError as error:
                responses.append(pb.InferenceResponse(error=triton_error(error)))
        if not self._is_decoupled:
            return responses
        for request, response in zip(requests, responses, strict=True):
            sender = request.get_response_sender()
            sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def _make_wiring(
        self, name: str, parameters: StageParameters, config: EngineConfig, welcome: wire.Welcome
    ) -> Wiring | None:
        if name == "health":
            return None
        checkpoint = local_path(config.checkpoint)
        if parameters.text("tokenizer_dir"):
            checkpoint = parameters.tokenizer_directory()
        is_echo_off = parameters.flag("exclude_input_in_output", False)
        skip_special = parameters.flag("skip_special_tokens", True)
        if name == "composed":
            has_tokenizer = (checkpoint / "tokenizer.json").is_file()
            return Composed(
                self._bridge,
                Vocabulary(
                    TokenBytes.load(checkpoint) if has_tokenizer else None,
                    load_end_ids(checkpoint),
                    skip_special,
                    welcome.vocab_size,
                ),
                frozenset(self._outputs),
                is_echo_off,
                welcome.max_model_len,
            )
        add_special = parameters.flag("add_special_tokens", True)
        text = Text(checkpoint, add_special, skip_special, welcome.max_model_len)
        if name == "fused":
            return Fused(self._bridge, text, is_echo_off)
        if name == "vllm":
            return Vllm(self._bridge, text)
        if name == "llmapi":
            return LlmApi(self._bridge, text, self._is_decoupled, config.block_size)
        raise ValueError(f"model.json: no wiring {name!r:.64}")


def read_settings(version_directory: Path) -> tuple[str, EngineConfig]:
    """Return the wiring of a model, and the engine's settings with an absolute checkpoint.

    Raises ValueError that names the file and what is wrong with it.
    """
    path = version_directory / "model.json"
    settings = _read(path)
    if settings.engine is None and settings.engine_of is not None:
        path = version_directory.parents[1] / settings.engine_of / "1" / "model.json"
        engine = _read(path).engine
    else:
        engine = settings.engine
    if engine is None:
        raise ValueError(f"{path}: holds no `engine`")
    checkpoint = (path.parent / local_path(engine.checkpoint)).resolve()
    share = memory_share(deployments_of(version_directory.parents[1]), path.parents[1].name)
    return settings.wiring, msgspec.structs.replace(
        engine, checkpoint=text_of(checkpoint), memory_share=share
    )


def _uses_engine(ours: StageParameters, model: str) -> bool:
    """Return whether another model of the server uses the engine of this one."""
    repository = ours.version_directory.parents[1]
    try:
        return engine_model_of(repository / model) == ours.engine_model
    except ValueError:  # which its own process reports
        return False


def _read(path: Path) -> Settings:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
