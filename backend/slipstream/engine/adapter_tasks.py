"""Adapters that clients have numbered (`lora_task_id`), for later requests, in bounded memory."""

from collections import Counter
from collections.abc import Callable

from slipstream_contract.errors import Code, ContractError

from slipstream.core.adapter import Adapter


class AdapterTasks:
    """Adapters by the clients' numbers, the last used last; each counts as a name of its adapter.

    Args:
        max_bytes: of different adapters: beyond, the one that was used longest ago is discarded.
            The last one is always kept.
        drop: takes a name from an adapter.
    """

    def __init__(self, max_bytes: int, drop: Callable[[Adapter], None]) -> None:
        self._max_bytes = max_bytes
        self._drop = drop
        self._tasks: dict[int, Adapter] = {}
        self._num_tasks: Counter[bytes] = Counter()  # by digest
        self._num_bytes = 0  # of different ones

    def use(self, task_id: int) -> Adapter:
        """Return the adapter of a number, used last now. Raises ContractError (NOT_FOUND)."""
        adapter = self._tasks.pop(task_id, None)
        if adapter is None:
            raise ContractError(
                f"LoRA task {task_id} not found in cache: send lora_weights and lora_config with "
                "lora_task_id once",
                Code.NOT_FOUND,
            )
        self._tasks[task_id] = adapter
        return adapter

    def put(self, task_id: int, adapter: Adapter) -> None:
        """Point a number to an adapter, and discard what there is no memory for."""
        adapter.num_names += 1
        self._num_tasks[adapter.digest] += 1
        if self._num_tasks[adapter.digest] == 1:
            self._num_bytes += adapter.num_bytes
        before, self._tasks[task_id] = self._tasks.pop(task_id, None), adapter
        if before is not None:
            self._discard(before)
        while len(self._tasks) > 1 and self._num_bytes > self._max_bytes:
            self._discard(self._tasks.pop(next(iter(self._tasks))))

    def count(self, adapter: Adapter) -> int:
        """Return how many numbers an adapter has."""
        return sum(each is adapter for each in self._tasks.values())

    def check_integrity(self) -> None:
        """Assert that bytes and counts are those of the adapters."""
        sizes = {each.digest: each.num_bytes for each in self._tasks.values()}
        assert self._num_bytes == sum(sizes.values())
        assert self._num_tasks == Counter(each.digest for each in self._tasks.values())

    def _discard(self, adapter: Adapter) -> None:
        """Take a number from what it pointed to."""
        self._num_tasks[adapter.digest] -= 1
        if not self._num_tasks[adapter.digest]:
            del self._num_tasks[adapter.digest]
            self._num_bytes -= adapter.num_bytes
        self._drop(adapter)
