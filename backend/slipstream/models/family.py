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
ReadRopes = Callable[[Reader, int], tuple[RopeConfig, RopeConfig]]


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
    tensors: TensorNames
    gguf: GgufForm | None  # None: GGUF files of the family are not served
    build: Build | None  # None: `decoder.build_decoder`, from the axes


_FAMILIES: dict[str, Family] = {}


def family(
    *architectures: str,
    keys: str = "",
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation] | None = None,
    has_windows: bool = True,
    read_ropes: ReadRopes = read_rope,
    tensors: TensorNames | None = None,
    gguf: GgufForm | None = None,
    config_class: ConfigClass | None = None,
    build: Build | None = None,
) -> Callable[[Callable[[Reader], Axes]], Callable[[Reader], Axes]]:
    """Register a family by the function that reads its axes from config.json.

    Args:
        architectures: values of `architectures` in config.json.
        keys: keys of config.json that it reads besides the common ones, separated by spaces.
        activation_key, activations: key of the activation, and its values.
        has_windows: whether layers may have a sliding window.
        read_ropes: reads the rotary embeddings for full attention and for windows.
        tensors: names in the checkpoint that differ from Llama's.
        gguf: what the family is in GGUF files.
        config_class: keys and defaults, if transformers does not have the architecture.
        build: builds a decoder that the axes cannot describe.
    """

    def register(axes: Callable[[Reader], Axes]) -> Callable[[Reader], Axes]:
        for name in architectures:
            assert name not in _FAMILIES, f"two files are for {name}"
            _FAMILIES[name] = Family(
                name,
                axes.__module__.rpartition(".")[2],
                config_class or read_config_class(name),
                axes,
                words(keys) | {activation_key},
                activation_key,
                activations or {"silu": Activation.SILU, "swish": Activation.SILU},
                has_windows,
                read_ropes,
                tensors or TensorNames(),
                gguf,
                build,
            )
        return axes

    return register


def registered() -> Mapping[str, Family]:
    """Return the families of all imported files, by architecture."""
    return _FAMILIES
