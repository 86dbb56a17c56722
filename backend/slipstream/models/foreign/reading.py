"""Read a checkpoint whose decoder is a class of transformers; refuse, by name, what cannot be one.

What the class asks of attention is not guessed from its configuration: it runs once, without data.
Code of a checkpoint is never run.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from slipstream_contract.limits import INT32_MAX
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.errors import CheckpointError
from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.cache_scheme import quantization_of
from slipstream.models.files import read_json, tensor_entries
from slipstream.models.foreign.decoder import build_foreign
from slipstream.models.foreign.interface import NAME, LayerAsk, Recorder, attending
from slipstream.models.foreign.names import is_read
from slipstream.models.foreign.parts import Parts, empty_model
from slipstream.models.hf import MOST_LAYERS, dtype_of, eos_ids
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader

Refuse = Callable[[str], CheckpointError]
_NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"
_PROBED = 3  # tokens of the run without data
# Kinds of rotation whose angles depend on the longest sequence of a step.
_VARYING = ("dynamic", "longrope")
_KINDS = {"full_attention": False, "sliding_attention": True}


def read_foreign(directory: Path) -> ModelConfig:
    """Read config.json as transformers' class of its architecture does.

    Raises `CheckpointError`, which names the key or the property of the class that is in the way.
    """
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = Reader(read_json(directory / "config.json"), str(directory / "config.json"))
    architecture, kind = _class_of(config)
    _check_keys(config, directory)
    own = _own_config(config, kind)
    refuse = partial(_refusal, config)
    model = _made(kind, own, refuse)
    unread = _unread(directory, model._keys_to_ignore_on_load_unexpected)
    _check_class(model, own, refuse)
    layers, width, num_logits = _run(model, refuse)
    ask = _same(layers, own, refuse)
    windows = _windows(own, layers, refuse)
    config.defaults = {"eos_token_id": getattr(own, "eos_token_id", None)}
    heads = (ask.num_heads, ask.num_kv_heads, ask.head_size)
    inner = getattr(own, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * width
    positions = getattr(own, "max_position_embeddings", None)
    if type(positions) is not int or not 1 <= positions <= INT32_MAX:
        raise refuse(f"max_position_embeddings = {positions} is no context of 1 to {INT32_MAX}")
    return ModelConfig(
        architecture=architecture,
        dims=Dims(num_logits, width, inner, len(layers), *heads, eps=1e-6),
        axes=Axes(),
        tensors=TensorNames(unread=(*TensorNames().unread, *unread)),
        ropes=(RopeConfig(),) * len(layers),
        windows=windows,
        max_positions=positions,
        ties_embeddings=bool(own.tie_word_embeddings),
        dtype=dtype_of(config),
        eos_ids=eos_ids(config, directory, num_logits),
        fp8_cache=False,
        ignored=(),
        build=partial(build_foreign, kind, own),
    )


def _refusal(config: Reader, why: str) -> CheckpointError:
    return config.refusal("architectures", f"cannot be served by transformers' class: {why}")


def _class_of(config: Reader) -> tuple[str, type[Any]]:
    """Return the architecture and its class, which must be a decoder of transformers' own."""
    names = config.data.get("architectures")
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.data.get("auto_map"):
        raise config.refusal("auto_map", "names code of the checkpoint, which is never run")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        version = transformers.__version__
        raise config.refusal("architectures", f"is no decoder that transformers {version} has")
    kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        raise config.refusal("architectures", "is no class that transformers exports")
    return str(names[0]), kind


def _check_keys(config: Reader, directory: Path) -> None:
    """Refuse, before the class is made, what would take long or cannot be read."""
    if config.data.get("is_encoder_decoder"):
        raise config.refusal("is_encoder_decoder", "is not implemented")
    found = quantization_of(directory)
    if found is not None:
        raise CheckpointError(
            f"{directory}: weights quantised by {found[0]} need a family of Slipstream's own: "
            "backend_model = 'transformers' reads 16 and 32 bits"
        )
    for key, value in config.data.items():
        if key.startswith(("num_", "n_")) and isinstance(value, int) and value > MOST_LAYERS:
            raise config.refusal(key, f"is above {MOST_LAYERS}")


def _own_config(config: Reader, kind: type[Any]) -> Any:
    """Return the configuration of transformers' class."""
    model_type = config.data.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise config.refusal("model_type", "is none that transformers has")
    made = CONFIG_MAPPING[model_type]
    if not isinstance(kind.config_class, type) or not issubclass(made, kind.config_class):
        name = kind.config_class.model_type
        raise config.refusal("model_type", f"is not that of {kind.__name__}, {name}")
    try:
        own = made.from_dict(dict(config.data))
    except Exception as error:
        raise config.refusal("model_type", f"is not read by transformers: {_line(error)}") from None
    if own.get_text_config() is not own or not hasattr(own, "num_hidden_layers"):
        raise config.refusal("model_type", "is not that of a decoder alone, but of several parts")
    return own


def _line(error: Exception) -> str:
    """Return the message as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _made(kind: type[Any], own: Any, refuse: Refuse) -> Any:
    """Return the model without data, in bfloat16: all of its operations then know their shapes."""
    try:
        return empty_model(kind, own, torch.bfloat16)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # a table of its own attentions
            raise refuse(_NO_INTERFACE) from None
        raise refuse(f"it cannot be made: {_line(error)}") from None


def _run(model: Any, refuse: Refuse) -> tuple[list[LayerAsk], int, int]:
    """Run it: what its layers ask of attention, and the sizes of states and logits."""
    recorder, parts = Recorder(), Parts(model)
    tokens = torch.zeros(_PROBED, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), attending(recorder):
            states = parts.states(tokens, tokens)
            logits = parts.logits(states)
    except Exception as error:
        raise refuse(f"it does not run without data: {_line(error)}") from None
    return recorder.layers, states.shape[-1], logits.shape[-1]


def _same(layers: list[LayerAsk], own: Any, refuse: Refuse) -> LayerAsk:
    """Return what all layers ask but for windows; refuse what kernels do not have."""
    if not layers:
        raise refuse(_NO_INTERFACE)
    if len(layers) != own.num_hidden_layers:
        count = own.num_hidden_layers
        raise refuse(f"attention runs {len(layers)} times in num_hidden_layers = {count}")
    others = sorted({name for layer in layers for name in layer.others})
    if others:
        raise refuse(f"its attention has {', '.join(others)}, which no kernel here takes")
    first = layers[0]
    if any(layer[:4] != first[:4] for layer in layers):
        raise refuse("its layers differ in heads or their size, so no cache is common to them")
    if first.value_size != first.head_size:
        raise refuse(f"keys of {first.head_size} numbers have values of {first.value_size}")
    if first.num_heads % first.num_kv_heads or first.head_size % 2:
        raise refuse(
            f"{first.num_heads} heads of {first.head_size} with {first.num_kv_heads} of keys"
        )
    return first


def _check_class(model: Any, own: Any, refuse: Refuse) -> None:
    """Refuse caches of other kinds, changing rotations, and weights that would be read wrongly."""
    if model._is_stateful:
        raise refuse("it keeps states of another kind than keys and values")
    body = model.base_model
    if body is model:
        raise refuse("it has no base model, whose states become logits")
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise refuse("it takes no position_ids, which tokens of several sequences need")
    if kinds := set(_rope_kinds(own)) & set(_VARYING):
        raise refuse(f"its rotation is {kinds.pop()}: angles depend on the longest of a step")
    if not is_read(model):
        raise refuse("checkpoints have its tensors in other pieces than the class")


def _rope_kinds(own: Any) -> Iterable[str]:
    """Yield the kinds of rotation, of each kind of layer if they differ."""
    found = getattr(own, "rope_parameters", None) or {}
    for each in (found, *found.values()):
        if isinstance(each, dict) and isinstance(each.get("rope_type"), str):
            yield each["rope_type"]


def _windows(own: Any, layers: list[LayerAsk], refuse: Refuse) -> tuple[int, ...]:
    """Return each layer's window; refuse a class that has one and does not pass it on."""
    seen, window = [layer.window for layer in layers], getattr(own, "sliding_window", None)
    kinds = getattr(own, "layer_types", None)
    if kinds is None:
        if window and not any(seen) and getattr(own, "use_sliding_window", True):
            raise refuse(f"sliding_window = {window} does not reach its attention")
        return tuple(seen)
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise refuse(f"layer_types has {', '.join(unknown)}")
    for i, (kind, found) in enumerate(zip(kinds, seen, strict=True)):
        if found != (window if _KINDS[kind] else 0):
            raise refuse(f"layer {i} is {kind}, but its attention has a window of {found}")
    return tuple(seen)


def _unread(directory: Path, patterns: Iterable[str]) -> list[str]:
    """Return the tensors that the class says may be left over."""
    if not patterns or not list(directory.glob("*.safetensors*")):
        return []
    names = tensor_entries(directory)
    return [name for name in names if any(re.search(each, name) for each in patterns)]
