"""What a family of decoders is: which keys it reads, where its decoder differs, what tensors are
called. No torch.

A family's file calls `family(...)` on the function that reads its part of config.json; nothing else
needs to know that the file is there (`registry.py` imports all of them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Activation, Axes, TensorNames
from slipstream.models.config_class import ConfigClass, read_config_class
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader, words
from slipstream.models.ropes import read_rope

if TYPE_CHECKING:
    from slipstream.layers.decoder import Decoder
    from slipstream.models.weights import Weights


Build = Callable[[ModelConfig, "Weights", int], "Decoder"]
ReadRopes = Callable[[Reader, int], tuple[RopeConfig, RopeConfig]]


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one architecture are read and built."""

    architecture: str
    name: str  # of its file
    config_class: ConfigClass
    axes: Callable[[Reader], Axes]
    keys: frozenset[str]  # of config.json, read beside those of all families
    activation_key: str
    activations: Mapping[str, Activation]  # what that key may say
    has_windows: bool
    read_ropes: ReadRopes  # of layers that see everything, and of those with a window
    tensors: TensorNames
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
    config_class: ConfigClass | None = None,
    build: Build | None = None,
) -> Callable[[Callable[[Reader], Axes]], Callable[[Reader], Axes]]:
    """Register a family by the function that reads its axes from config.json.

    Args:
        architectures: names that `config.json` may give.
        keys: of config.json that it reads beside those of all families, with spaces between.
        activation_key, activations: where the activation is said, and which there are.
        has_windows: whether layers may see the newest tokens alone.
        read_ropes: rotary embeddings of layers without and with a window.
        tensors: names in the checkpoint where they are not Llama's.
        config_class: keys and defaults, where transformers has no such architecture.
        build: of a decoder that the axes do not describe.
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
                build,
            )
        return axes

    return register


def registered() -> Mapping[str, Family]:
    """Families of the files that were imported, by architecture."""
    return _FAMILIES
