"""The adapters that requests may name: loaded and unloaded while others run.

Names point to adapters, which are known by their digest: two names of the same weights share them,
and a name that is loaded again is another adapter for all requests from then on. What runs keeps
its own; an adapter is removed from the device when no name points to it and no request has it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream_contract.errors import Code, ContractError, clip

from slipstream.core.adapter import Adapter
from slipstream.errors import StartError
from slipstream.wire import AdapterInfo

MAX_NAME = 256  # characters
_SHOWN = 8  # names in an error


class ReadWeights(Protocol):
    """Weights in host memory."""

    digest: bytes
    rank: int
    num_bytes: int


class Holder(Protocol):
    """What holds adapters on the device."""

    def read(self, path: str) -> Any:
        """Read and check a directory, in any thread; return `ReadWeights`. Raises `StartError`."""

    def add(self, weights: Any) -> int:
        """Take weights; return their number, which is used once."""

    def remove(self, number: int) -> None:
        """Discard an adapter; steps in flight keep it to their end."""


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

    def __init__(self, holder: Holder | None = None, root: str = "", base: str = "") -> None:
        """Start without adapters.

        Args:
            holder: of the device; None: no adapter can be loaded.
            root: directory out of which requests may have adapters loaded; empty: none may.
            base: the model's name, which no adapter may have.
        """
        self._holder = holder
        self._root = root
        self._base = base
        self._names: dict[str, Adapter] = {}
        self._paths: dict[str, str] = {}  # of each name
        self._adapters: dict[bytes, Adapter] = {}  # by digest
        self._loading: list[_Loading] = []
        self._threads: ThreadPoolExecutor | None = None
        self.when_changed: Callable[[], None] = lambda: None  # called when names have changed

    @property
    def is_loading(self) -> bool:
        """Whether `poll` has to be called again."""
        return bool(self._loading)

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

    def infos(self) -> list[AdapterInfo]:
        """Return what there is, by name."""
        return [
            AdapterInfo(name, self._paths[name], found.rank, found.num_bytes, found.digest.hex())
            for name, found in sorted(self._names.items())
        ]

    def acquire(self, adapter: Adapter | None) -> None:
        """Keep an adapter for a request."""
        if adapter is not None:
            adapter.num_users += 1

    def release(self, adapter: Adapter | None) -> None:
        """Give it up again."""
        if adapter is not None:
            adapter.num_users -= 1
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
        weights = self._threads.submit(self._holder.read, found)
        self._loading.append(_Loading(name, found, reply, weights))

    def poll(self) -> None:
        """Take what has been read, and call its `reply`."""
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

    def unload(self, name: str) -> None:
        """Discard a name; requests that run keep its adapter. Raises ContractError."""
        adapter = self.find(name)
        if adapter is None:
            raise ContractError("the adapter's name is empty")
        del self._names[name], self._paths[name]
        adapter.num_names -= 1
        self._remove_unused(adapter)
        self.when_changed()

    def check_integrity(self) -> None:
        """Assert that counts agree, and that nothing is kept that has no use."""
        for adapter in self._adapters.values():
            names = sum(each is adapter for each in self._names.values())
            assert adapter.num_names == names
            assert adapter.num_users >= 0
            assert names or adapter.num_users, "an adapter without a use"
        assert self._names.keys() == self._paths.keys()

    def _check(self, name: str) -> None:
        if self._holder is None:
            raise ContractError("this engine serves no adapters", Code.UNSUPPORTED)
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ContractError(
                f"the adapter's name is {clip(name)}, not 1 to {MAX_NAME} printable characters"
            )
        if name == self._base:
            raise ContractError(f"the adapter's name is {clip(name)}, which is the model's")

    def _inside(self, path: str) -> str:
        """Return the directory below the root. Raises ContractError for any other."""
        if not self._root:
            raise ContractError(
                "the engine has no adapter_root: requests cannot load adapters "
                "(slipstream compose --adapter-root)"
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
        """Point a name to weights; the adapter that it pointed to stays with what runs."""
        assert self._holder is not None, "checked"
        adapter = self._adapters.get(weights.digest)
        if adapter is None:
            number = self._holder.add(weights)
            adapter = Adapter(number, weights.digest, weights.rank, weights.num_bytes)
            self._adapters[weights.digest] = adapter
        adapter.num_names += 1
        before, self._names[name], self._paths[name] = self._names.get(name), adapter, path
        if before is not None:
            before.num_names -= 1
            self._remove_unused(before)
        self.when_changed()

    def _remove_unused(self, adapter: Adapter) -> None:
        if not adapter.num_users and not adapter.num_names:
            assert self._holder is not None, "it came from there"
            del self._adapters[adapter.digest]
            self._holder.remove(adapter.number)


def parse_adapters(text: str) -> dict[str, str]:
    """Read `NAME=DIR[,NAME=DIR]`. Raises ContractError."""
    found: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        name, _, path = entry.partition("=")
        if not name or not path:
            raise ContractError(f"adapters has {clip(entry)}, not NAME=DIR")
        if name in found:
            raise ContractError(f"adapters has {clip(name)} twice")
        found[name] = path
    return found
