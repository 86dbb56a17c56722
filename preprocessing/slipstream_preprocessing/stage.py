"""The Triton side of preprocessing: text in, token ids out, many requests at a time."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.parameters import StageParameters
from slipstream_contract.runtime import hide_shared_memory, open_runtime
from slipstream_contract.vitals import Vitals

from slipstream_preprocessing.batch import encode_batch
from slipstream_preprocessing.encode import Encoder

log = logging.getLogger(__name__)


class TritonPythonModel:
    """Model `preprocessing`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer. Raises where it cannot be had."""
        hide_shared_memory()
        parameters = StageParameters(args)
        directory = parameters.tokenizer_directory()
        self._names = [spec["name"] for spec in parameters.config["input"]]
        self._encoder = Encoder.load(
            directory,
            add_special_tokens=parameters.flag("add_special_tokens", True),
            max_model_len=context_limit(parameters, directory),
        )
        runtime = open_runtime(os.getppid())
        self._vitals = Vitals(runtime.vitals(parameters.model, os.getpid()))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response a request, in their order."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """End the thread that tells of life."""
        self._vitals.close()

    def _respond(self, request: Any) -> Any:
        self._vitals.begin()
        try:
            inputs = {}
            for name in self._names:
                tensor = pb.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    inputs[name] = tensor.as_numpy()
            outputs = encode_batch(self._encoder, inputs)
            return pb.InferenceResponse([pb.Tensor(name, value) for name, value in outputs.items()])
        except ContractError as error:
            return _failed(error)
        except Exception:
            log.exception("preprocessing failed")
            return _failed(ContractError("preprocessing failed", Code.INTERNAL))
        finally:
            self._vitals.end()


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


def _failed(error: ContractError) -> Any:
    name = "INVALID_ARG" if error.code is Code.INVALID_ARGUMENT else error.code.value
    return pb.InferenceResponse(error=pb.TritonError(str(error), getattr(pb.TritonError, name)))
