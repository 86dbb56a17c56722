"""The Triton side of preprocessing: text in, token ids out, many requests at a time."""

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb
from slipstream_contract.errors import Code, ContractError, label_of
from slipstream_contract.inputs import read_parameters
from slipstream_contract.parameters import StageParameters
from slipstream_contract.probes import PROBE
from slipstream_runtime.admission import Gate, LoadFile, Passed, passed_path_of, path_of
from slipstream_runtime.directory import hide_shared_memory, open_runtime
from slipstream_runtime.stub import close_inherited, must_end, quicken_bytes, rest_collector
from slipstream_runtime.vitals import Vitals
from slipstream_runtime.waking import wake_gently

from slipstream_preprocessing.batch import encode_batch
from slipstream_preprocessing.encode import Encoder

log = logging.getLogger(__name__)

# What was given comes back: of use to nobody but the next step of an ensemble.
_STEP_OUTPUT = "REQUEST_OUTPUT_LEN"
_TELL_S = 1.0


class TritonPythonModel:
    """Model `preprocessing`.

    Where the engine has said that no more may wait, steps of an ensemble are refused, before they
    are tokenised if possible. A caller who asks for `REQUEST_OUTPUT_LEN`, but not for every output,
    is an ensemble; who only wants token ids gets them.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer. Raises where it cannot be had."""
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
        runtime = open_runtime(os.getppid())
        passed = Passed(passed_path_of(runtime.socket))
        self._gate = Gate(LoadFile(path_of(runtime.socket)), passed)
        self._refusals = Refusals(parameters.model)
        self._vitals = Vitals(runtime.vitals(parameters.model, os.getpid()))
        rest_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response a request, in their order."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """End the threads."""
        self._refusals.close()
        self._vitals.close()

    def _respond(self, request: Any) -> Any:
        self._vitals.start()
        try:
            is_step = self._is_step(request)
            if is_step:
                self._gate.raise_if_full()
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = encode_batch(self._encoder, inputs, read_parameters(request))
            if is_step:
                self._gate.admit(int(outputs["REQUEST_INPUT_LEN"].max()))
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
    """What is refused here, on the server's metrics page, by reason: one of `REASONS`.

    Told once a second by a thread: each word to the server costs a tenth of a refusal.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts: Counter[str] = Counter()
        self._told: dict[str, tuple[Any, int]] = {}  # the metric, and its value
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
        self._thread.start()

    def count(self, reason: str) -> None:
        """One more; by one thread."""
        self._counts[label_of(reason)] += 1

    def close(self) -> None:
        """Tell no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            family = pb.MetricFamily(
                name="slipstream_refusals_total",
                description="Requests that were not begun, by why",
                kind=pb.MetricFamily.COUNTER,
            )
            while not self._closed.wait(_TELL_S):
                with must_end():
                    self._tell(family)
        except Exception as error:  # `--allow-metrics=false`
            log.warning("no metrics: %s", error)

    def _tell(self, family: Any) -> None:
        for reason, number in list(self._counts.items()):
            if reason not in self._told:
                labels = {"model": self._model, "reason": reason}
                self._told[reason] = family.Metric(labels=labels), 0
            metric, told = self._told[reason]
            if number > told:
                metric.increment(number - told)
                self._told[reason] = metric, number


def context_limit(parameters: StageParameters, checkpoint: Path) -> int | None:
    """Tokens that the model's context certainly does not exceed, if they are known."""
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
    """Whether the request parameters say so; those that cannot be read are a client's."""
    try:
        return PROBE in json.loads(request.parameters() or "{}")
    except ValueError:  # no UTF-8, for one
        return False


def _failed(error: ContractError) -> Any:
    name = "INVALID_ARG" if error.code is Code.INVALID_ARGUMENT else error.code.value
    return pb.InferenceResponse(error=pb.TritonError(str(error), getattr(pb.TritonError, name)))
