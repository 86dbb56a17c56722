"""Say what GGUF calls a family, how it stores its tensors, what its keys mean. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.errors import CheckpointError
from slipstream.models.reader import Reader


class GgufKeys:
    """Typed look-ups of the keys below `ARCHITECTURE.` in a file's metadata.

    Args:
        name: `general.architecture`.
        metadata: the whole of it.
        tensors: name of each tensor -> its shape, the slowest dimension first.
        where: the file, for messages.
    """

    def __init__(
        self,
        name: str,
        metadata: Mapping[str, object],
        tensors: Mapping[str, tuple[int, ...]],
        where: str,
    ) -> None:
        self.tensors = tensors
        self.where = where
        self._name = name
        self._reader = Reader(metadata, where)
        self._seen: set[str] = set()

    def get(self, key: str) -> object:
        """Return a value; one for every layer, all of them alike, counts as one."""
        full = f"{self._name}.{key}"
        self._seen.add(full)
        value = self._reader.get(full)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def has(self, key: str) -> bool:
        """Return whether there is such a key."""
        return self.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number >= 1; raises `CheckpointError` for anything else."""
        return self._one(key).whole(f"{self._name}.{key}", default)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number > 0; raises `CheckpointError` for anything else."""
        return self._one(key).positive(f"{self._name}.{key}", default)

    def refusal(self, key: str, why: str) -> CheckpointError:
        """Return an error that names file, key and value, with the reason `why`."""
        return self._reader.refusal(f"{self._name}.{key}", why)

    def unseen(self) -> dict[str, object]:
        """Return the keys below the architecture's name that nothing has looked up."""
        data, start = self._reader.data, f"{self._name}."
        return {k: v for k, v in data.items() if k.startswith(start) and k not in self._seen}

    @property
    def num_heads(self) -> int:
        """Heads of queries in a layer."""
        return self.whole("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values in a layer."""
        return self.whole("attention.head_count_kv", self.num_heads)

    def _one(self, key: str) -> Reader:
        """Return a reader in which equal values of all layers are one."""
        full, value = f"{self._name}.{key}", self.get(key)
        return Reader({} if value is None else {full: value}, self.where)


Config = Callable[[GgufKeys], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class GgufForm:
    """What a family is in GGUF files.

    Attributes:
        name: `general.architecture`. Where families share it, a window decides between them.
        pairs_rows: whether the rows of q and k are stored so that two neighbours rotate together.
        norms_added: what is added to all weights of norms.
        config: returns the keys of config.json that the family alone has.
    """

    name: str
    pairs_rows: bool = False
    norms_added: float = 0.0
    config: Config = field(default=lambda keys: {})
