"""Register families of decoders: keys of config.json, axes, names of tensors. No torch.

A family's file decorates the function that reads its part of config.json with `family(...)`. No
other file names a family: `registry.py` imports all files of `families/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Activation, Axes, TensorNames
from slipstream.models.config_class import ConfigClass, read_config_class
from slipstream.models.gguf_form import GgufForm
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader, words
from slipstream.models.ropes import read_rope

if TYPE_CHECKING:
    from slipstream.layers.decoder import Decoder
    from slipstream.layers.source import WeightSource


Build = Callable[[ModelConfig, "WeightSource", int], "Decoder"]
ReadRopes = Callable[[Reader, int, int], tuple[RopeConfig, RopeConfig]]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read and build checkpoints of one architecture."""

    architecture: str
    name: str  # name of its file
    config_class: ConfigClass
    axes: Callable[[Reader], Axes]
    keys: frozenset[str]  # keys of config.json that only some families read
    activation_key: str
    activations: Mapping[str, Activation]  # value of that key -> activation
    has_windows: bool
    read_ropes: ReadRopes  # for full attention, and for layers with a window
    still: Callable[[Reader, int], frozenset[int]]  # of so many layers, those that do not rotate
    aliases: Mapping[str, tuple[str, ...]]  # key that is read here -> what config.json calls it
    derived: Callable[[Reader], Mapping[str, object]]  # values of such keys, from the family's own
    tensors: TensorNames
    names: Callable[[Reader], TensorNames] | None  # where keys decide
    gguf: GgufForm | None  # None: GGUF files of the family are not served
    said: Mapping[str, object]  # keys that have no default, or no model's, as a first one says them
    build: Build | None  # None: `decoder.build_decoder`, from the axes
    # The architecture of another generation that config.json says by its keys; None: this one.
    generation: Callable[[Reader], str | None]


_FAMILIES: dict[str, Family] = {}


def family(
    *architectures: str,
    keys: str = "",
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation] | None = None,
    has_windows: bool = True,
    read_ropes: ReadRopes = read_rope,
    still: Callable[[Reader, int], frozenset[int]] = lambda config, num_layers: frozenset(),
    aliases: str = "",
    derived: Callable[[Reader], Mapping[str, object]] = lambda config: {},
    tensors: TensorNames | Callable[[Reader], TensorNames] | None = None,
    gguf: GgufForm | None = None,
    config_class: ConfigClass | None = None,
    said: Mapping[str, object] | None = None,
    build: Build | None = None,
    generation: Callable[[Reader], str | None] = lambda config: None,
) -> Callable[[Callable[[Reader], Axes]], Callable[[Reader], Axes]]:
    """Register a family by the function that reads its axes from config.json.

    Args:
        architectures: values of `architectures` in config.json.
        keys: keys of config.json that it reads besides the common ones, separated by spaces.
        activation_key, activations: key of the activation, and its values.
        has_windows, still: whether layers may have a sliding window; which do not rotate.
        read_ropes: reads the rotary embeddings for full attention and for windows.
        aliases: keys that are read for every family, and what config.json calls them:
            "hidden_size=n_embd num_hidden_layers=n_layer"; a key may have several.
        derived: returns values of such keys that follow from the family's own keys.
        tensors: names in the checkpoint that differ from Llama's, or what finds them.
        gguf, config_class: the family in GGUF files; keys and defaults that transformers lacks.
        said, build: keys without a model's default, for the page; builds what no axes describe.
        generation: returns the architecture of a file with these names by its other keys.
    """
    renamed = _pairs(aliases)

    def register(axes: Callable[[Reader], Axes]) -> Callable[[Reader], Axes]:
        for name in architectures:
            assert name not in _FAMILIES, f"two files are for {name}"
            _FAMILIES[name] = Family(
                name,
                axes.__module__.rpartition(".")[2],
                config_class or read_config_class(name),
                axes,
                words(keys) | {activation_key} | set(sum(renamed.values(), ())),
                activation_key,
                activations or {"silu": Activation.SILU, "swish": Activation.SILU},
                has_windows,
                read_ropes,
                still,
                renamed,
                derived,
                *_names(tensors),
                gguf,
                said or {},
                build,
                generation,
            )
        return axes

    return register


def _names(
    tensors: TensorNames | Callable[[Reader], TensorNames] | None,
) -> tuple[TensorNames, Callable[[Reader], TensorNames] | None]:
    """Return names of tensors, and what finds them where keys decide."""
    if isinstance(tensors, TensorNames):
        return tensors, None
    return TensorNames(), tensors


def _pairs(aliases: str) -> dict[str, tuple[str, ...]]:
    """Split "a=b a=c d=e" into what each key is called."""
    found: dict[str, tuple[str, ...]] = {}
    for pair in aliases.split():
        key, _, name = pair.partition("=")
        found[key] = (*found.get(key, ()), name)
    return found


_REFUSED: dict[str, str] = {}


def refuses(architecture: str, why: str) -> None:
    """Register why an architecture is not served, which its refusal says."""
    _REFUSED[architecture] = why


def refused() -> Mapping[str, str]:
    """Return why architectures are not served, of all imported files."""
    return _REFUSED


def registered() -> Mapping[str, Family]:
    """Return the families of all imported files, by architecture."""
    return _FAMILIES
