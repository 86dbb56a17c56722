"""Make a `config.json` of a GGUF file's metadata, and of which tensors it has. No torch."""

import struct
from collections.abc import Iterator, Mapping

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.family import Family
from slipstream.models.gguf.file import GgufFile
from slipstream.models.gguf.types import BF16, F16, F32
from slipstream.models.gguf_form import MAGNITUDE, GgufForm, GgufKeys
from slipstream.models.registry import family_of, supported

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"  # by which each frequency is divided: a part of config.json
ROPE_FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
OF_SOME = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")
# Keys of rotary scaling -> the one value that changes nothing.
_NEUTRAL_ROPE = {
    "rope.scaling.alpha": 1.0,
    "rope.scaling.attn_factor": 1.0,
    MAGNITUDE: 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scale_linear": 1.0,
}
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
_NEUTRAL: tuple[object, ...] = (0, 0.0, False, "", [])


def families_in_gguf() -> Iterator[Family]:
    """Yield the families of which GGUF files are served."""
    return (family for family in map(family_of, supported()) if family.gguf is not None)


def form_of(family: Family) -> GgufForm:
    """Return what a family of `families_in_gguf` is in GGUF."""
    assert family.gguf is not None
    return family.gguf


def family_of_file(file: GgufFile) -> Family:
    """Return the family of a file; raises `CheckpointError` for one that is not served.

    A file with experts, or with a window, is of the family that has them; a key may tell, too.
    """
    name = file.metadata.get(ARCHITECTURE)
    found = [family for family in families_in_gguf() if form_of(family).name == name]
    if not found:
        known = ", ".join(dict.fromkeys(form_of(family).name for family in families_in_gguf()))
        raise CheckpointError(
            f"{file.path}: {ARCHITECTURE} = {clip(name)} is not supported; one of {known} is"
        )
    if len(found) == 1:
        return found[0]
    has_experts = file.metadata.get(f"{name}.expert_count") not in (None, 0)
    has_window = file.metadata.get(f"{name}.attention.sliding_window") not in (None, 0)
    found.sort(key=lambda each: each.has_windows != has_window)
    found.sort(key=lambda each: form_of(each).has_experts != has_experts)
    found.sort(key=lambda each: not _is_told(form_of(each), file))
    return found[0]


def _is_told(form: GgufForm, file: GgufFile) -> bool:
    """Return whether a key says that the file is of this family."""
    if form.told_by is None:
        return False
    key, value = form.told_by
    return file.metadata.get(f"{form.name}.{key}") == value


def keys_of(file: GgufFile) -> GgufKeys:
    """Return the look-ups of a file's keys."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return GgufKeys(str(file.metadata[ARCHITECTURE]), file.metadata, shapes, str(file.path))


def config_of(file: GgufFile) -> dict[str, object]:
    """Return a `config.json`; raises `CheckpointError` for what is missing or not implemented.

    Keys that llama.cpp does not know, either, are in it under their own names: they are reported
    with those of any other config.json that change nothing.
    """
    family, keys = family_of_file(file), keys_of(file)
    form = form_of(family)
    hidden, heads = keys.whole("embedding_length"), keys.num_heads
    size = keys.whole("attention.key_length", max(hidden // heads, 1))
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.config_class.model_types[0],
        "num_hidden_layers": keys.num_layers,
        "max_position_embeddings": keys.whole("context_length"),
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": size,
        "rms_norm_eps": keys.positive(_epsilon(keys)),
        "vocab_size": _vocab_size(file, keys),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file),
    }
    config |= _rope(file, keys, form, size)
    if form.is_partial:
        config["partial_rotary_factor"] = keys.whole("rope.dimension_count", size) / size
    if not form.is_latent:
        _check_sizes(keys, size, form.is_partial)
    if form.has_experts:
        config |= form.experts(keys)
    own = form.own_keys(keys)
    rest = {key: value for key, value in config.items() if key not in own}
    return _named(rest, family) | own | _others(keys)


def _named(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the keys as the family calls them, without those that it does not have."""
    found = {}
    for key, value in config.items():
        own = family.aliases.get(key, (key,))[0]
        if own != key or key not in OF_SOME or family.config_class.reads(key):
            found[own] = value
    return found


def _epsilon(keys: GgufKeys) -> str:
    names = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
    return names[0] if keys.has(names[0]) else names[1]


def _vocab_size(file: GgufFile, keys: GgufKeys) -> int:
    """Return the rows of the embedding; refuse a number in the metadata that contradicts them."""
    shape = keys.tensors.get(EMBEDDING)
    if shape is None:
        raise CheckpointError(f"{file.path}: tensor {EMBEDDING} is missing")
    if keys.whole("vocab_size", shape[0]) != shape[0]:
        raise keys.refusal("vocab_size", f"contradicts {EMBEDDING} of {shape[0]} rows")
    return shape[0]


def _dtype(file: GgufFile) -> str:
    """Return that of the matrices' values; bfloat16 for quantised ones, whose range is as wide."""
    kind = file.tensors[EMBEDDING].type
    return {F32: "float32", F16: "float16", BF16: "bfloat16"}.get(kind, "bfloat16")


def _check_sizes(keys: GgufKeys, size: int, is_partial: bool) -> None:
    """Refuse values of another size than keys, and rotation of a part of a head."""
    names = ["attention.value_length", "attention.key_length_swa", "attention.value_length_swa"]
    names += [] if is_partial else ["rope.dimension_count", "rope.dimension_count_swa"]
    for key in names:
        if keys.whole(key, size) != size:
            raise keys.refusal(key, f"is not implemented; only the {size} of a head's keys is")


def _rope(file: GgufFile, keys: GgufKeys, form: GgufForm, size: int) -> dict[str, object]:
    """Return the keys of config.json for the rotary embedding, of heads of `size`."""
    config: dict[str, object] = {"rope_theta": keys.positive("rope.freq_base", 10_000.0)}
    context = keys.whole("context_length")
    scaling = _scaling(keys, context)
    lists = [name for name in (ROPE_FACTORS, *ROPE_FACTORS_BY_LENGTH) if name in file.tensors]
    neutral = dict(_NEUTRAL_ROPE)
    if lists:
        if scaling:
            raise keys.refusal("rope.scaling.type", f"is not implemented beside {lists[0]}")
        turning = keys.whole("rope.dimension_count", size)
        factors = [_rope_factors(file, name, turning) for name in lists]
        scaling = {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[-1]}
        scaling |= {"attention_factor": 1.0, "original_max_position_embeddings": context}
    if ROPE_FACTORS_BY_LENGTH[0] in lists:
        key = "rope.scaling.original_context_length"
        config["original_max_position_embeddings"] = keys.whole(key, context)
        scaling["attention_factor"] = keys.positive("rope.scaling.attn_factor", 1.0)
        del neutral["rope.scaling.attn_factor"]
    if form.rope is not None and (own := form.rope(keys)):
        scaling = {"rope_type": "default", **scaling, **own}
        del neutral[MAGNITUDE]
    for key, value in neutral.items():
        if keys.get(key) not in (None, value):
            raise keys.refusal(key, f"is not implemented; only {value:g} is")
    for key in _HARMLESS:
        keys.get(key)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(keys: GgufKeys, context: int) -> dict[str, object]:
    """Return how positions are stretched; empty: they are not. Without a type it is linear."""
    kind = keys.get("rope.scaling.type") or "linear"
    factor = keys.positive("rope.scaling.factor") if keys.get("rope.scaling.factor") else 1.0
    original = keys.whole("rope.scaling.original_context_length", context)
    fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type", "is not implemented; none, linear and yarn are")
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
    }


def _rope_factors(file: GgufFile, name: str, size: int) -> list[float]:
    """Read the factors by which the frequencies are divided, one for each pair of a head."""
    tensor = file.tensors[name]
    if tensor.type is not F32 or tensor.shape != (size // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {name} is {tensor.type.name} {list(tensor.shape)}, "
            f"not F32 [{size // 2}]"
        )
    with tensor.path.open("rb") as data:
        data.seek(tensor.begin)
        return list(struct.unpack(f"<{size // 2}f", data.read(tensor.end - tensor.begin)))


def _others(keys: GgufKeys) -> dict[str, object]:
    """Return the keys that change nothing; refuse those that ask llama.cpp for something."""
    from gguf.constants import Keys

    classes = [Keys.LLM, *(each for each in vars(Keys).values() if isinstance(each, type))]
    known = {
        text.removeprefix("{arch}.")
        for each in classes
        for text in vars(each).values()
        if isinstance(text, str) and text.startswith("{arch}.")
    }
    others = keys.unseen()
    for full, value in others.items():
        key = full.partition(".")[2]
        if key in known and value not in _NEUTRAL and key != "attention.causal":
            raise keys.refusal(key, "is not implemented")
        if key == "attention.causal" and value is not True:
            raise keys.refusal(key, "is not implemented; only true is")
    return {full: clip(value) for full, value in others.items() if not _is_known(full, known)}


def _is_known(full: str, known: set[str]) -> bool:
    return full.partition(".")[2] in known
