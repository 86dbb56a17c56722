"""The models of a gateway: their engines, their text sides, and their names."""

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter
from slipstream_contract.deployment import Deployment, deployments_of
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.shares import memory_share
from slipstream_runtime.directory import Runtime
from slipstream_runtime.stub import rest_collector

from slipstream_gateway.engine_client import EngineClient
from slipstream_gateway.errors import ApiError
from slipstream_gateway.model_text import ModelText
from slipstream_gateway.settings import Settings

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_RESCAN_S = 2.0
_GONE_S = 60.0  # an engine that is gone for so long was unloaded
_SUPERVISOR_S = 30  # time that the supervisor has to replace a stuck engine


@dataclass(frozen=True)
class Surroundings:
    """What the models of a gateway share."""

    settings: Settings
    directory: Path  # the runtime directory
    loop: asyncio.AbstractEventLoop
    pool: ThreadPoolExecutor

    @property
    def is_alone(self) -> bool:
        """Whether the engines are this gateway's own."""
        return self.settings.runtime is None


def engine_config(deployment: Deployment, deployments: list[Deployment]) -> EngineConfig:
    """Return the settings of a deployment's engine. Raises ValueError naming the file."""
    try:
        config = msgspec.convert(dict(deployment.settings), EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{deployment.engine_model}/1/model.json: {error}") from None
    share = memory_share(deployments, deployment.engine_model)
    return msgspec.structs.replace(
        config, checkpoint=str(deployment.checkpoint), memory_share=share
    )


class Model:
    """A deployment: an engine, and what turns text into its tokens.

    Attributes:
        text: None until the engine has said how long its context is.
    """

    def __init__(self, deployment: Deployment, config: EngineConfig, around: Surroundings) -> None:
        """Start to connect to the engine; a gateway that is alone starts it."""
        self.deployment = deployment
        self.config = config
        self.created = int(time.time())
        self.text: ModelText | None = None
        self._fault = ""  # why there is no text yet
        self._unreadable = ""  # why there will be none, unless its files change
        self._around = around
        self._is_closed = threading.Event()
        runtime = Runtime(around.directory, deployment.folder)
        runtime.home.mkdir(mode=0o700, exist_ok=True)
        self._runtime = runtime
        is_expected = around.is_alone or runtime.socket.exists()
        self._seen_s = time.monotonic() if is_expected else -_GONE_S  # when there was an engine
        self._starter = SupervisorStarter(runtime, config, os.getpid())
        self.engine = EngineClient(
            runtime,
            around.loop,
            self._starter.ensure if around.is_alone else _start_nothing,
            config.stuck_after_s + _SUPERVISOR_S,
            keeps_engine=around.is_alone,
            outage=self._starter.outage,
        )
        self._thread = threading.Thread(target=self._run, name="model-text", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is shown in answers without one."""
        deployment, welcome = self.deployment, self.engine.welcome()
        own = (deployment.public_name, deployment.name)
        return tuple(dict.fromkeys(own if welcome is None else (welcome.model, *own)))

    @property
    def adapters(self) -> Mapping[str, wire.AdapterInfo] | None:
        """The adapters that its engine has, by name; None: it may have some, but is away."""
        config, found = self.config, self.engine.connection.adapters
        can_have = config.adapters or config.adapter_root or config.adapter_dir
        return {} if found is None and not can_have else found

    @property
    def is_loaded(self) -> bool:
        """Whether there is an engine, or was one a moment ago, or there will be."""
        if self._runtime.unloaded.exists():
            return False
        if self.engine.welcome() is not None or self._runtime.socket.exists():
            self._seen_s = time.monotonic()
        return time.monotonic() - self._seen_s < _GONE_S

    def ready_text(self) -> ModelText:
        """Return the text side.

        Raises ContractError: UNAVAILABLE before the engine is up, UNSUPPORTED for a checkpoint
        without a tokenizer that can be read.
        """
        if self.text is not None:
            return self.text
        if self._unreadable:
            raise ContractError(self._unreadable, Code.UNSUPPORTED)
        fault = self._fault or self._starter.failure()
        message = fault or "the engine is not up yet; try again"
        raise ContractError(message, Code.UNAVAILABLE, "engine_down")

    def check_engine(self) -> None:
        """Raise ContractError, the one of a request, while no engine is there to take any.

        An engine is there once the text side has been made for it, too; a text side that cannot
        be made is not the engine's: requests say so.
        """
        if self.text is None and not self._unreadable:
            self.ready_text()
        if self.engine.connection.adapters is None:
            raise ContractError(self.outage(), Code.UNAVAILABLE, "engine_down")

    def outage(self) -> str:
        """Return, in one line, that there is no engine and why; for while none is."""
        return self._starter.outage()

    def close(self) -> None:
        """End the connection."""
        self._is_closed.set()
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        """Read the tokenizer whenever an engine says something else of itself."""
        before: tuple[object, ...] = ()
        while not self._is_closed.wait(_LOOK_S):
            try:
                welcome = self.engine.connection.wait_welcome(0)
            except ContractError as error:
                self._fault = error.message
                continue
            if welcome is None:
                continue
            now = (welcome.model, welcome.max_model_len, welcome.vocab_size)
            if now != before:
                self._load(welcome)
                before = now

    def _load(self, welcome: wire.Welcome) -> None:
        settings = self._around.settings
        try:
            self.text = ModelText(
                Path(self.config.checkpoint), welcome, self._around.pool, settings
            )
            self._fault = self._unreadable = ""
            rest_collector()
        except (OSError, ValueError, ContractError, ApiError) as error:
            said = f"the tokenizer cannot be read: {error}"
            said = error.message if isinstance(error, ContractError) else said
            self.text, self._unreadable = None, said
            _log.error("%s: %s; its requests are refused", welcome.model, self._unreadable)
        except Exception as error:
            self.text, self._fault = None, f"the tokenizer cannot be read: {error}"
            _log.exception("the tokenizer of %s cannot be read", welcome.model)


class Models:
    """The models of a repository; what is added to it, or removed, is found within seconds."""

    def __init__(self, around: Surroundings) -> None:
        """Connect to all. Raises ValueError, OSError."""
        self._around = around
        self._by_name: dict[str, Model] = {}
        self._seen_ns = 0
        self.directory = around.directory
        self._rescan()
        if not self._by_name:
            repository = around.settings.repository
            raise ValueError(f"{repository}: has no model of ours; see `slipstream compose`")

    @property
    def all(self) -> tuple[Model, ...]:
        """List those that are loaded; a repository's only one in any case."""
        models = tuple(self._by_name.values())
        return models if len(models) == 1 else tuple(m for m in models if m.is_loaded)

    def find(self, name: object) -> Model:
        """Return what `resolve` does, without the adapter. Raises what that does."""
        return self.resolve(name)[0]

    def resolve(self, name: object) -> tuple[Model, str]:
        """Return the model of that name, without a name the only one, and the adapter, or "".

        A deployment's own name goes before public names, which several may share. The adapters of
        an engine are looked at once: it may end, or come, at any moment.

        Raises ApiError, or ContractError for a name that an engine may know which is away.
        """
        models = self.all
        if name is None or name == "":
            if len(models) == 1:
                return models[0], ""
            raise ApiError(400, f"model is missing: it is one of {self._known()}", "model")
        if not isinstance(name, str):
            raise ApiError(400, f"model is {name!r:.64}, not a text", "model")
        own = [model for model in models if model.deployment.name == name]
        found = own or [model for model in models if name in model.names]
        adapters = [] if found else [(model, model.adapters) for model in models]
        found = found or [model for model, its in adapters if its is not None and name in its]
        if len(found) == 1:
            return found[0], name if adapters else ""
        if found:
            those = ", ".join(model.deployment.name for model in found)
            raise ApiError(400, f"model {name!r:.128} is the name of several: {those}", "model")
        for away in (model for model, its in adapters if its is None):
            raise ContractError(
                f"{away.names[0]} may have {name!r:.128}, but {away.outage()}",
                Code.UNAVAILABLE,
                "engine_down",
            )
        message = f"model {name!r:.128} does not exist; there are {self._known()}"
        raise ApiError(404, message, "model", "model_not_found")

    def named(self) -> list[tuple[Model, str]]:
        """Return each name by which `find` reaches a model, with the model."""
        pairs = [(model, name) for model in self.all for name in model.names]
        own = {model.deployment.name for model, _ in pairs}
        count = Counter(name for _, name in pairs)
        shown = [
            (model, name)
            for model, name in pairs
            if name == model.deployment.name or (count[name] == 1 and name not in own)
        ]
        adapters = [(model, name) for model in self.all for name in sorted(model.adapters or ())]
        named = Counter(name for _, name in adapters)
        return shown + [
            (model, name) for model, name in adapters if named[name] == 1 and name not in count
        ]

    def served(self) -> list[tuple[Model, str]]:
        """Return those of `named` whose engine takes requests now.

        Raises ContractError, the one of a request, if no engine does.
        """
        found, faults = [], []
        for model in self.all:
            try:
                model.check_engine()
                found.append(model)
            except ContractError as error:
                faults.append(error)
        if faults and not found:
            raise faults[0]
        return [(model, name) for model, name in self.named() if model in found]

    def _known(self) -> str:
        return ", ".join(name for _, name in self.named())

    def close(self) -> None:
        """End all connections."""
        for model in self._by_name.values():
            model.close()

    # --- what changes in the repository --------------------------------------------------------

    async def follow(self) -> None:
        """Look for models that are added or removed, until cancelled."""
        while True:
            await asyncio.sleep(_RESCAN_S)
            try:
                gone = self._rescan()
            except (ValueError, OSError) as error:
                _log.warning("the repository cannot be read: %s", error)
                continue
            for model in gone:
                await asyncio.to_thread(model.close)

    def _rescan(self) -> list[Model]:
        """Add new models; return those that are gone. Raises ValueError, OSError."""
        repository = self._around.settings.repository
        changed_ns = repository.stat().st_mtime_ns
        if changed_ns == self._seen_ns:
            return []
        found = deployments_of(repository)
        for deployment in found:
            if deployment.name not in self._by_name:
                config = engine_config(deployment, found)
                self._by_name[deployment.name] = Model(deployment, config, self._around)
        self._seen_ns = changed_ns
        names = {deployment.name for deployment in found}
        return [self._by_name.pop(name) for name in self._by_name.keys() - names]


def open_models(
    settings: Settings, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor
) -> Models:
    """Connect to the engines of a repository. Raises ValueError, OSError."""
    directory = settings.runtime or Path(tempfile.mkdtemp(prefix="slipstream-gateway-"))
    return Models(Surroundings(settings, directory, loop, pool))


def _start_nothing() -> None:
    """Leave it to the server's models to start an engine."""
