"""The Triton side of preprocessing: text in, token ids out, for many requests at a time."""

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb
from slipstream_contract.contained import contained
from slipstream_contract.errors import Code, ContractError, label_of
from slipstream_contract.inputs import read_parameters, refuse_others
from slipstream_contract.parameters import StageParameters
from slipstream_contract.probes import PROBE
from slipstream_runtime.admission import Gate, LoadFile, Passed, passed_path_of, path_of
from slipstream_runtime.directory import hide_shared_memory, open_runtime
from slipstream_runtime.stub import close_inherited, must_end, quicken_bytes, rest_collector
from slipstream_runtime.vitals import Vitals
from slipstream_runtime.waking import wake_gently

from slipstream_preprocessing.batch import encode_batch, with_empty_lists
from slipstream_preprocessing.encode import Encoder

log = logging.getLogger(__name__)

# An output that echoes an input: only the next step of an ensemble needs it.
_STEP_OUTPUT = "REQUEST_OUTPUT_LEN"
_REPORT_S = 1.0
_PARAMETERS = ("add_special_tokens", PROBE)


class TritonPythonModel:
    """Model `preprocessing`.

    If the engine's queue is full, requests of an ensemble's step are refused here, before they are
    tokenised if possible. A request for `REQUEST_OUTPUT_LEN`, but not for every output, comes from
    an ensemble; requests for the token ids themselves are always served.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer. Raises OSError, UnsupportedTokenizerError or ContractError."""
        hide_shared_memory()
        close_inherited()
        wake_gently()
        quicken_bytes(pb)
        parameters = StageParameters(args)
        directory = parameters.tokenizer_directory()
        self._outputs = frozenset(spec["name"] for spec in parameters.config["output"])
        self._encoder = Encoder.load(
            directory,
            add_special_tokens=parameters.flag("add_special_tokens", True),
            max_model_len=context_limit(parameters, directory),
        )
        runtime = open_runtime(os.getppid(), parameters.engine_model)
        passed = Passed(passed_path_of(runtime.socket))
        self._gate = Gate(LoadFile(path_of(runtime.socket)), passed)
        self._refusals = Refusals(parameters.model)
        self._vitals = Vitals(runtime.vitals(parameters.model, os.getpid()))
        rest_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response per request, in order."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Stop the threads."""
        self._refusals.close()
        self._vitals.close()

    def _respond(self, request: Any) -> Any:
        self._vitals.start()
        try:
            is_step = self._is_step(request)
            if is_step:
                self._gate.raise_if_full()
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            parameters = read_parameters(request)
            if not is_step:  # else the next step reads the others
                refuse_others(parameters, _PARAMETERS)
            with contained():
                outputs = encode_batch(self._encoder, inputs, parameters)
            if is_step:
                self._gate.pass_on(int(outputs["REQUEST_INPUT_LEN"].max()))
            else:
                outputs = with_empty_lists(outputs)
            return pb.InferenceResponse([pb.Tensor(name, value) for name, value in outputs.items()])
        except ContractError as error:
            if not _is_probe(request):
                self._refusals.count(error.reason)
            return _failed(error)
        except Exception:
            log.exception("preprocessing failed")
            return _failed(ContractError("preprocessing failed", Code.INTERNAL))
        finally:
            self._vitals.finish()

    def _is_step(self, request: Any) -> bool:
        requested = frozenset(request.requested_output_names())
        return _STEP_OUTPUT in requested and requested != self._outputs


class Refusals:
    """Counter of refusals on the server's metrics page, by reason: one of `REASONS`.

    A thread reports once a second: each call into the server costs a tenth of a refusal.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts: Counter[str] = Counter()
        self._reported: dict[str, tuple[Any, int]] = {}  # metric and its value
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
        self._thread.start()

    def count(self, reason: str) -> None:
        """Count one refusal; call from one thread only."""
        self._counts[label_of(reason)] += 1

    def close(self) -> None:
        """Stop reporting."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            family = pb.MetricFamily(
                name="slipstream_refusals_total",
                description="Requests that were not begun, by why",
                kind=pb.MetricFamily.COUNTER,
            )
            while not self._closed.wait(_REPORT_S):
                with must_end():
                    self._report(family)
        except Exception as error:  # `--allow-metrics=false`
            log.warning("no metrics: %s", error)

    def _report(self, family: Any) -> None:
        for reason, number in list(self._counts.items()):
            if reason not in self._reported:
                labels = {"model": self._model, "reason": reason}
                self._reported[reason] = family.Metric(labels=labels), 0
            metric, reported = self._reported[reason]
            if number > reported:
                metric.increment(number - reported)
                self._reported[reason] = metric, number


def context_limit(parameters: StageParameters, checkpoint: Path) -> int | None:
    """Return an upper bound of the model's context in tokens; None if unknown."""
    limit = parameters.engine().get("max_model_len")
    if limit is not None:
        return int(limit)
    path = checkpoint / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    positions = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("factor") or 1.0
    return None if positions is None else int(positions * max(1.0, factor))


def _is_probe(request: Any) -> bool:
    """Return whether the request is a probe; one with unreadable parameters is a client's."""
    try:
        return PROBE in json.loads(request.parameters() or "{}")
    except ValueError:  # invalid UTF-8, for example
        return False


def _failed(error: ContractError) -> Any:
    name = "INVALID_ARG" if error.code is Code.INVALID_ARGUMENT else error.code.value
    return pb.InferenceResponse(error=pb.TritonError(str(error), getattr(pb.TritonError, name)))
