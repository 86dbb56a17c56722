"""Say what GGUF calls a family, how it stores its tensors, what its keys mean. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.errors import CheckpointError
from slipstream.models.axes import QkvOrder, TensorNames, joined
from slipstream.models.reader import Reader

MAGNITUDE = "rope.scaling.yarn_log_multiplier"  # of scores, by a stretched rotation
JOINED_QKV = "self_attn.qkv_proj"  # q, k and v of a file in one


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
    def num_layers(self) -> int:
        """Layers that run: those that predict further tokens lie behind them, and do not."""
        key = "nextn_predict_layers"
        all_layers = self.whole("block_count")
        behind = self.whole(key) if self.get(key) else 0
        if behind >= all_layers:
            raise self.refusal(key, f"is not below block_count = {all_layers}")
        return all_layers - behind

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


def plain_experts(keys: GgufKeys) -> dict[str, object]:
    """Return how many experts there are, and how many a row has; refuse other ways to choose."""
    if keys.get("expert_weights_scale") not in (None, 0.0, 1.0):
        raise keys.refusal("expert_weights_scale", "is not implemented")
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
    }


def windows_of(keys: GgufKeys, every: int) -> dict[str, object]:
    """Return which layers have a window: a list says, or a number, by default `every`.

    So many layers, one has full attention.
    """
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is True or pattern is False:  # one for every layer
        pattern = [pattern] * keys.num_layers
    if not isinstance(pattern, list):
        return {"sliding_window_pattern": every if pattern is None else pattern}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[each is True or each == 1] for each in pattern]}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """What a family is in GGUF files.

    Attributes:
        name: `general.architecture`. Where families share it, experts and a window decide.
        pairs_rows: whether the rows of q and k are stored so that two neighbours rotate together.
        norms_added: what is added to all weights of norms.
        told_by: a key of the metadata, and its value where files are of this family and not of
            another of the same name.
        has_experts: whether MLPs are mixtures; experts: keys of config.json that say which.
        is_latent: whether the cache has latents: heads of keys and values then have own sizes.
        qkv, joins_gate_up: as of `TensorNames`; files have own orders, and nothing transposed.
        norms_each_head: likewise.
        names: parts of names in the file -> of the decoder, where they differ from Llama's.
        is_partial: whether a part of a head may rotate.
        flags: keys of config.json that are true where layer 0 has this tensor.
        numbers: keys of config.json -> of the metadata, where these are there and not 0.
        fixed: keys of config.json that all files have, and their values.
        config: returns other keys of config.json that the family alone has; None: a null.
        rope: likewise of the rotation.
    """

    name: str
    pairs_rows: bool = False
    norms_added: float = 0.0
    told_by: tuple[str, object] | None = None
    has_experts: bool = False
    experts: Config = plain_experts
    is_latent: bool = False
    qkv: QkvOrder = QkvOrder.SPLIT
    joins_gate_up: bool = False
    norms_each_head: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    is_partial: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    config: Config = field(default=lambda keys: {})
    rope: Config | None = None

    @property
    def tensors(self) -> TensorNames:
        """The names under which tensors of a file are found: the decoder's, but for joined ones."""
        own = joined(JOINED_QKV) if self.qkv is not QkvOrder.SPLIT else {}
        own |= joined("mlp.up_proj", "mlp") if self.joins_gate_up else {}
        return TensorNames(
            own,
            qkv=self.qkv,
            joins_gate_up=self.joins_gate_up,
            norms_each_head=self.norms_each_head,
        )

    def own_keys(self, keys: GgufKeys) -> dict[str, object]:
        """Return the keys of config.json that the family alone has."""
        flags = {key: f"blk.0.{tensor}" in keys.tensors for key, tensor in self.flags.items()}
        found = {key: keys.get(name) for key, name in self.numbers.items()}
        numbers = {key: x for key, x in found.items() if x is False or x not in (None, 0)}
        return {**self.fixed, **flags, **numbers, **self.config(keys)}
