"""The models of a gateway: their engines, their text sides, and their names."""

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.directory import OWNER_VARIABLE, Runtime

from slipstream_gateway.engine import Engine
from slipstream_gateway.errors import ApiError
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.settings import Settings

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_RETRY_S = 2.0
_SUPERVISOR_S = 30  # time that the supervisor has to replace a stuck engine


class _File(msgspec.Struct):
    """The part of `tensorrt_llm/1/model.json` that counts here."""

    engine: EngineConfig


def read_engine(repository: Path, model: str = "tensorrt_llm") -> EngineConfig:
    """Return the settings of a repository's engine, its checkpoint absolute.

    Raises ValueError that names the file.
    """
    path = repository / model / "1" / "model.json"
    try:
        engine = msgspec.json.decode(path.read_bytes(), type=_File).engine
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    checkpoint = (path.parent / engine.checkpoint).resolve()
    return msgspec.structs.replace(engine, checkpoint=str(checkpoint))


class Model:
    """A deployment: an engine, and what turns text into its tokens.

    Attributes:
        names: those that requests may use; the first is shown in answers without one.
        text: None until the engine has said how long its context is.
        fault: why there is no `text`, in words; empty: the engine is starting.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        runtime: Runtime,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Start to connect to the engine, and a supervisor that starts it where none runs."""
        self.names: tuple[str, ...] = (name,)
        self.config = config
        self.created = int(time.time())
        self.text: ModelText | None = None
        self.fault = ""
        self._pool = pool
        self._template = settings.chat_template
        self._is_closed = threading.Event()
        owner = int(os.environ.get(OWNER_VARIABLE) or os.getpid())
        self._starter = SupervisorStarter(runtime, config, owner)
        unanswered = config.stuck_after_s + _SUPERVISOR_S
        self.engine = Engine(runtime, loop, self._starter.ensure, unanswered)
        self._thread = threading.Thread(target=self._load, name="model-text", daemon=True)
        self._thread.start()

    def ready_text(self) -> ModelText:
        """Return the text side. Raises ContractError (UNAVAILABLE) before the engine is up."""
        if self.text is not None:
            return self.text
        message = self.fault or self._starter.failure() or "the engine is starting; try again"
        raise ContractError(message, Code.UNAVAILABLE, "engine_down")

    def close(self) -> None:
        """End the connection."""
        self._is_closed.set()
        self._thread.join()
        self.engine.close()

    def _load(self) -> None:
        """Read the tokenizer once the engine has said how long its context is."""
        while not self._is_closed.is_set():
            try:
                welcome = self.engine.connection.wait_welcome(_LOOK_S)
            except ContractError as error:
                self.fault = error.message
                self._is_closed.wait(_LOOK_S)
                continue
            if welcome is None:
                continue
            self.names = tuple(dict.fromkeys((welcome.model, *self.names)))
            try:
                self.text = ModelText(
                    Path(self.config.checkpoint), welcome.max_model_len, self._pool, self._template
                )
            except Exception as error:
                self.fault = f"the tokenizer cannot be read: {error}"
                _log.exception("the tokenizer of %s cannot be read", welcome.model)
            return


class Models:
    """All models of a gateway; `directory` is the runtime directory."""

    def __init__(self, models: Iterable[Model], directory: Path) -> None:
        self.all = tuple(models)
        self.directory = directory

    def find(self, name: object) -> Model:
        """Return the model of that name; without a name the only one. Raises ApiError."""
        if name is None or name == "":
            if len(self.all) == 1:
                return self.all[0]
            raise ApiError(400, f"model is missing: it is one of {self._known()}", "model")
        if not isinstance(name, str):
            raise ApiError(400, f"model is {name!r:.64}, not a text", "model")
        for model in self.all:
            if name in model.names:
                return model
        message = f"model {name!r:.128} does not exist; there are {self._known()}"
        raise ApiError(404, message, "model", "model_not_found")

    def _known(self) -> str:
        return ", ".join(name for model in self.all for name in model.names)

    def close(self) -> None:
        """End all connections."""
        for model in self.all:
            model.close()


def open_models(
    settings: Settings, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor
) -> Models:
    """Connect to the engines of a repository. Raises ValueError, OSError."""
    config = read_engine(settings.repository)
    directory = settings.runtime or Path(tempfile.mkdtemp(prefix="slipstream-gateway-"))
    runtime = Runtime(directory)
    return Models([Model("ensemble", config, runtime, settings, loop, pool)], directory)
