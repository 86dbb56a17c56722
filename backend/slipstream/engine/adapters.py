"""The adapters that requests may name: loaded and unloaded while others run.

Names point to adapters, which are known by their digest: two names of the same weights share them,
and a name that is loaded again is another adapter for all requests from then on. What runs keeps
its own; an adapter is removed when no name points to it and no request has it. All are in host
memory; `adapter_room.py` decides which of them are on the device.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace
from slipstream_contract.errors import Code, ContractError, clip
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import TABLE, PromptTable

from slipstream.core.adapter import Adapter, check_name, with_virtual
from slipstream.engine.adapter_directory import AdapterDirectory
from slipstream.engine.adapter_room import AdapterRoom, Pool
from slipstream.engine.adapter_tasks import AdapterTasks
from slipstream.engine.served import Changed
from slipstream.errors import CheckpointError, StartError
from slipstream.wire import AdapterInfo, Submit

_log = logging.getLogger(__name__)

MAX_PATH = 1024  # characters, of a request's
MAX_NAMES = 1 << 16  # as metrics say (`max_lora`)
_SHOWN = 8  # names in an error


class ReadWeights(Protocol):
    """Weights in host memory."""

    digest: bytes
    rank: int
    num_bytes: int
    changes_head: bool
    num_virtual: int


class Holder(Pool, Protocol):
    """What holds adapters, in host memory and on the device."""

    def read(self, path: str, root: str = "") -> Any:
        """Read and check a directory, in any thread; return `ReadWeights`. Raises `StartError`.

        `root`: outside which no file may be opened; empty: any may.
        """

    def read_task(self, task: LoraTask) -> Any:
        """Read and check the weights of a request; return `ReadWeights`. Raises `StartError`."""

    def read_table(self, table: PromptTable) -> Any:
        """Read and check the embeddings of a request; return `ReadWeights`. Raises `StartError`."""

    def store(self, weights: Any) -> int:
        """Take weights into host memory; return their number, which is used once."""

    def room_refusal(self, weights: Any) -> str | None:
        """Say why weights never fit into the pool, with how much both are; None: they fit."""


Reply = Callable[[ContractError | None], None]


@dataclass(slots=True)
class _Loading:
    """A directory that is being read."""

    name: str
    path: str
    reply: Reply
    weights: Future[Any]


class AdapterStore:
    """All adapters of an engine, in its own thread; directories are read in another."""

    def __init__(
        self,
        holder: Holder | None = None,
        root: str = "",
        base: str = "",
        max_task_bytes: int = 1 << 30,
    ) -> None:
        """Start without adapters.

        Args:
            holder: of the device; None: no adapter can be loaded.
            root: directory out of which requests may have adapters loaded; empty: none may.
            base: the model's name, which no adapter may have.
            max_task_bytes: of adapters that clients have numbered; see `AdapterTasks`.
        """
        self._holder = holder
        self.room = AdapterRoom(holder)
        self._root = root
        self._base = base
        self._names: dict[str, Adapter] = {}
        self._paths: dict[str, str] = {}  # of each name
        self._adapters: dict[bytes, Adapter] = {}  # by digest
        self._tasks = AdapterTasks(max_task_bytes, self._drop)
        self._read: Future[Any] | None = None  # weights of the request that is submitted
        self._loading: list[_Loading] = []
        self._threads: ThreadPoolExecutor | None = None
        self._directory: AdapterDirectory | None = None
        self.when_changed: Changed = lambda changed, removed: None

    @property
    def is_loading(self) -> bool:
        """Whether `poll` has to be called again."""
        return bool(self._loading) or self.room.is_loading

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of a name; None for no name. Raises ContractError (NOT_FOUND)."""
        if not name:
            return None
        adapter = self._names.get(name)
        if adapter is None:
            known = ", ".join(sorted(self._names)[:_SHOWN]) or "none"
            raise ContractError(
                f"adapter {clip(name)} is not loaded; those that are: {known}", Code.NOT_FOUND
            )
        return adapter

    def with_virtual(self, message: Submit, vocab_size: int) -> tuple[Submit, int]:
        """Return a request with its virtual tokens, and how many it has. Raises ContractError."""
        count = self._num_virtual(message)
        if not count:
            return message, 0
        token_ids = with_virtual(message.token_ids, count, vocab_size)
        return replace(message, token_ids=token_ids), count

    def _num_virtual(self, message: Submit) -> int:
        if message.table is None:
            found = self.find(message.adapter) if message.task is None else None
            return 0 if found is None else found.num_virtual
        if message.adapter or message.task is not None:
            raise ContractError(f"{TABLE} beside an adapter (lora_name, lora_task_id): ask for one")
        return message.table.num_rows

    @property
    def can_read(self) -> bool:
        """Whether requests may bring weights."""
        return self._holder is not None

    def read_weights(self, message: Submit) -> Any:
        """Read what a request brings, in any thread; return `ReadWeights`. Raises `StartError`."""
        assert self._holder is not None, "checked"
        if message.table is not None:
            return self._holder.read_table(message.table)
        assert message.task is not None, "it brings one of them"
        return self._holder.read_task(message.task)

    @contextmanager
    def having(self, weights: Future[Any]) -> Iterator[None]:
        """Have `choose` take weights that were read before, in what runs inside."""
        self._read = weights
        try:
            yield
        finally:
            self._read = None

    def choose(self, message: Submit) -> Adapter | None:
        """Return the adapter of a request: of its own table, by name or by number. One of a table
        is there until `release`. Raises ContractError.
        """
        if message.table is not None:
            return self._of_weights(message, TABLE)
        found = self.find(message.adapter) if message.task is None else self._of_task(message)
        values = message.sampling.values
        if found is None or values is None or not found.changes_head:
            return found
        if values.prompt is not None or values.context_logits:
            raise ContractError(
                "prompt_logprobs and return_context_logits are not implemented for an adapter "
                "that changes the head (lm_head)"
            )
        return found

    def _of_weights(self, message: Submit, what: str) -> Adapter:
        """Return the adapter that a request brings, which errors call `what`."""
        if self._holder is None:
            raise ContractError("this engine serves no adapters", Code.UNSUPPORTED)
        try:
            weights = self.read_weights(message) if self._read is None else self._read.result()
            return self._adopt(weights, what)
        except StartError as error:
            raise ContractError(str(error)) from None
        except MemoryError:
            raise ContractError(f"{what}: there is no memory for it", Code.UNAVAILABLE) from None

    def _of_task(self, message: Submit) -> Adapter:
        """Return the adapter that a client has numbered, after its weights were taken if it sends
        them: for this request and later ones. Raises ContractError (NOT_FOUND).
        """
        task = message.task
        assert task is not None, "checked"
        if not task.num_rows:
            return self._tasks.use(task.task_id)
        adapter = self._of_weights(message, f"LoRA task {task.task_id}")
        self._tasks.put(task.task_id, adapter)
        return adapter

    def infos(self) -> list[AdapterInfo]:
        """Return what there is, by name."""
        return [self._info(name) for name in sorted(self._names)]

    def _info(self, name: str) -> AdapterInfo:
        found = self._names[name]
        return AdapterInfo(name, self._paths[name], found.rank, found.num_bytes, found.digest.hex())

    def acquire(self, adapter: Adapter | None) -> None:
        """Keep an adapter for a request."""
        if adapter is not None:
            adapter.num_users += 1

    def release(self, adapter: Adapter | None) -> None:
        """Give it up again."""
        if adapter is not None:
            adapter.num_users -= 1
            if not adapter.num_users:
                self.room.unwant(adapter.number)
            self._remove_unused(adapter)

    def load(self, name: str, path: str) -> None:
        """Load a directory that the operator names, and wait for it. Raises ContractError."""
        self._check(name)
        assert self._holder is not None, "checked"
        try:
            self._put(name, path, self._holder.read(path))
        except StartError as error:
            raise ContractError(str(error)) from None

    def start_load(self, name: str, path: str, reply: Reply) -> None:
        """Load a directory below the root; `poll` calls `reply`. Raises ContractError."""
        self._check(name)
        assert self._holder is not None, "checked"
        found = self._inside(path)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "adapters")
        weights = self._threads.submit(self._holder.read, found, self._root)
        self._loading.append(_Loading(name, found, reply, weights))

    def poll(self) -> None:
        """Take what has been read, and call its `reply`; take what has come to the device."""
        self.room.poll()
        while self._loading and self._loading[0].weights.done():  # in order: the last one counts
            loading = self._loading.pop(0)
            error: ContractError | None = None
            try:
                self._put(loading.name, loading.path, loading.weights.result())
            except StartError as caught:
                error = ContractError(str(caught))
            except Exception as caught:
                reason = f"adapter {clip(loading.name)} could not be loaded"
                error = ContractError(f"{reason}: {type(caught).__name__}", Code.INTERNAL)
            loading.reply(error)

    def watch(self, root: str) -> AdapterDirectory:
        """Take the adapters of a directory, all that there are at once; `take_watched` takes later
        ones, once the directory is looked at (`start`). Raises ContractError.
        """
        if self._holder is None:
            raise ContractError("this engine serves no adapters", Code.UNSUPPORTED)
        self._directory = AdapterDirectory(Path(root), self._holder.read)
        self._directory.look()
        self._directory.look()
        self.take_watched()
        return self._directory

    def take_watched(self) -> None:
        """Load and unload what has changed in the directory; what has another path is left."""
        for change in () if self._directory is None else self._directory.take():
            known = self._paths.get(change.name)
            if change.weights is None:
                if known == change.path:
                    self.unload(change.name)
                continue
            try:
                self._check(change.name)
                if known not in (None, change.path):
                    raise ContractError(f"the name {clip(change.name)} is that of {known}")
                self._put(change.name, change.path, change.weights)
            except ContractError as error:
                _log.warning("adapter_dir: %s is not loaded: %s", change.path, error.message)
            except StartError as error:
                _log.warning("adapter_dir: %s is not loaded: %s", change.path, error)

    def unload(self, name: str) -> None:
        """Discard a name; requests that run keep its adapter. Raises ContractError."""
        adapter = self.find(name)
        if adapter is None:
            raise ContractError("the adapter's name is empty")
        del self._names[name], self._paths[name]
        self._drop(adapter)
        self.when_changed([], [name])

    def check_integrity(self) -> None:
        """Assert that counts agree, and that nothing is kept that has no use."""
        for adapter in self._adapters.values():
            names = sum(each is adapter for each in self._names.values())
            names += self._tasks.count(adapter)
            assert adapter.num_names == names
            assert adapter.num_users >= 0
            assert names or adapter.num_users, "an adapter without a use"
        self._tasks.check_integrity()
        assert self._names.keys() == self._paths.keys()

    def _check(self, name: str) -> None:
        if self._holder is None:
            raise ContractError("this engine serves no adapters", Code.UNSUPPORTED)
        check_name(name, self._base)
        if name not in self._names and len(self._names) >= MAX_NAMES:
            raise ContractError(
                f"adapter {clip(name)}: {MAX_NAMES} have names, no more are served",
                Code.UNAVAILABLE,
            )

    def _inside(self, path: str) -> str:
        """Return the directory below the root. Raises ContractError for any other."""
        if not self._root:
            raise ContractError(
                "the engine has no adapter_root: requests cannot load adapters "
                "(slipstream compose --adapter-root)"
            )
        if len(path) > MAX_PATH:
            raise ContractError(
                f"lora_path has {len(path)} characters, at most {MAX_PATH} are read"
            )
        root = Path(self._root).resolve()
        try:
            found = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a loop of links, or a zero byte
            raise ContractError(f"lora_path is {clip(path)}, which is no path") from None
        if not path or found == root or not found.is_relative_to(root):
            raise ContractError(f"lora_path is {clip(path)}, which is not below adapter_root")
        return str(found)

    def _put(self, name: str, path: str, weights: ReadWeights) -> None:
        """Point a name to weights; the adapter that it pointed to stays with what runs.

        Raises CheckpointError if they do not fit on the device.
        """
        adapter = self._adopt(weights, f"adapter {clip(name)}")
        adapter.num_names += 1
        before, self._names[name], self._paths[name] = self._names.get(name), adapter, path
        if before is not None:
            self._drop(before)
        self.when_changed([self._info(name)], [])

    def _adopt(self, weights: ReadWeights, what: str) -> Adapter:
        """Return the adapter of some weights, which is new if none has their digest.

        Raises CheckpointError, which names `what`, if they never fit into the device's pool.
        """
        assert self._holder is not None, "checked"
        adapter = self._adapters.get(weights.digest)
        if adapter is None:
            if (refusal := self._holder.room_refusal(weights)) is not None:
                raise CheckpointError(f"{what} {refusal}")
            number = self._holder.store(weights)
            facts = (weights.digest, weights.rank, weights.num_bytes, weights.changes_head)
            adapter = Adapter(number, *facts, weights.num_virtual)
            self._adapters[weights.digest] = adapter
        return adapter

    def _drop(self, adapter: Adapter) -> None:
        """Take a name, or a number, from what it pointed to."""
        adapter.num_names -= 1
        self._remove_unused(adapter)

    def _remove_unused(self, adapter: Adapter) -> None:
        if not adapter.num_users and not adapter.num_names:
            del self._adapters[adapter.digest]
            self.room.remove(adapter.number)
