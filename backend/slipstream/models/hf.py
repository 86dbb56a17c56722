"""A refusing reader of Hugging Face `config.json`: what it cannot honour, it names and refuses.

Every key is one of four: read into `ModelConfig`, demanded to be neutral, harmless to inference, or
unknown; an unknown key may say nothing (null, false, empty) or the checkpoint is refused. No torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.files import read_json, tensor_entries
from slipstream.models.registry import supported


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _keys(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings "
    "attention_bias mlp_bias hidden_act dtype torch_dtype eos_token_id rope_theta rope_scaling "
    "rope_parameters original_max_position_embeddings partial_rotary_factor sliding_window "
    "use_sliding_window max_window_layers layer_types"
)
# Training, generation defaults, labels, bookkeeping: inference is the same whatever they say.
_HARMLESS = _keys(
    "model_type transformers_version use_cache initializer_range bos_token_id pad_token_id "
    "sep_token_id pretraining_tp attention_dropout hidden_dropout resid_pdrop embd_pdrop "
    "attn_pdrop id2label label2id problem_type task_specific_params finetuning_task return_dict "
    "output_attentions output_hidden_states torchscript chunk_size_feed_forward tokenizer_class "
    "prefix max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "decoder_start_token_id keys_to_ignore_at_inference max_new_tokens attn_implementation "
    "neftune_noise_alpha gradient_checkpointing tie_encoder_decoder use_bfloat16 is_llama_config"
)
_HARMLESS_PREFIXES = ("_", "unsloth", "transformers.js")
_ROPE_KEYS = {
    "default": _keys(""),
    "linear": _keys("factor"),
    "llama3": _keys("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _keys(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate finetuned"
    ),
}
_ROPE_COMMON = _keys("type rope_type rope_theta partial_rotary_factor")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a family needs to build the decoder; all of it honoured."""

    architecture: str
    dims: Dims
    rope: RopeConfig
    max_positions: int
    attention_bias: bool
    mlp_bias: bool
    ties_embeddings: bool
    dtype: str | None  # the checkpoint's own, if config.json says
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint from outside: what a model repository needs to know of it."""

    architecture: str
    vocab_size: int
    max_positions: int
    dtype: str  # float32 | float16 | bfloat16
    eos_ids: tuple[int, ...]
    has_tokenizer: bool


class _Reader:
    """Typed look-ups in one JSON object that name file, key and value when they refuse."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data = data
        self._where = where
        self._prefix = prefix

    def refusal(self, key: str, why: str) -> CheckpointError:
        value = clip(self.data.get(key))
        return CheckpointError(f"{self._where}: {self._prefix}{key} = {value} {why}")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        if type(value) is not int or value < 1:
            raise self.refusal(key, "is not a whole number >= 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
            raise self.refusal(key, "is not a number > 0")
        return float(str(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "is neither true nor false")
        return value

    def child(self, key: str) -> "_Reader":
        """The object under a key; none or null reads as empty."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "is not an object")
        return _Reader(value or {}, self._where, f"{self._prefix}{key}.")


def _architecture(config: _Reader) -> str:
    names = config.data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported():
        raise config.refusal(
            "architectures", f"is not supported; one of {', '.join(supported())} is"
        )
    return str(names[0])


def _refuse_unknown(config: _Reader) -> None:
    for key, value in config.data.items():
        if key in _READ or key in _HARMLESS or key.startswith(_HARMLESS_PREFIXES):
            continue
        if value is None or value is False or value in ({}, [], ""):
            continue
        raise config.refusal(
            key, "is not implemented (if it does not change the computation, delete the key)"
        )


def _refuse_windows(config: _Reader, num_layers: int) -> None:
    """Sliding windows: refused if any layer would use one."""
    if config.has("sliding_window") and config.flag("use_sliding_window", default=True):
        starts = config.data.get("max_window_layers")  # layers below it see everything
        if not isinstance(starts, int) or starts < num_layers:
            raise config.refusal("sliding_window", "is in use, which is not implemented")
    kinds = config.data.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise config.refusal("layer_types", f"is not {num_layers} times full_attention")


def _dims(config: _Reader) -> Dims:
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    hidden = config.whole("hidden_size")
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"does not divide {heads} attention heads")
    if not config.has("head_dim") and hidden % heads:
        raise config.refusal("hidden_size", f"is not a multiple of {heads} attention heads")
    head_size = config.whole("head_dim", hidden // heads)
    if head_size % 2:
        raise config.refusal("head_dim", f"gives heads of {head_size}: rotation needs an even size")
    return Dims(
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.whole("intermediate_size"),
        num_layers=config.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        eps=config.positive("rms_norm_eps", 1e-6),
    )


def _rope_source(config: _Reader) -> _Reader:
    """The rotary parameters: `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    new, old = config.child("rope_parameters"), config.child("rope_scaling")
    if new.data and old.data and new.data != old.data:
        raise config.refusal("rope_scaling", "contradicts rope_parameters")
    rope = new if new.data else old
    theta = rope.data.get("rope_theta")
    if theta is not None and config.has("rope_theta") and theta != config.data["rope_theta"]:
        raise rope.refusal("rope_theta", f"contradicts rope_theta = {config.data['rope_theta']}")
    return rope


def _rope(config: _Reader, max_positions: int) -> RopeConfig:
    rope = _rope_source(config)
    kinds = {rope.data[key] for key in ("rope_type", "type") if isinstance(rope.data.get(key), str)}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in _ROPE_KEYS:
        key = "rope_type" if rope.has("rope_type") else "type"
        raise rope.refusal(key, f"is not implemented; one of {', '.join(_ROPE_KEYS)} is")
    for reader in (config, rope):
        if reader.positive("partial_rotary_factor", 1.0) != 1.0:
            raise reader.refusal("partial_rotary_factor", "is not implemented; only 1.0 is")
    for key in rope.data.keys() - _ROPE_COMMON - _ROPE_KEYS[kind]:
        if rope.data[key] is not None:
            raise rope.refusal(key, f"is not implemented for {kind} rotary embedding")
    theta = rope.positive("rope_theta", config.positive("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.positive("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    inner = rope.whole("original_max_position_embeddings", max_positions)
    original = config.whole("original_max_position_embeddings", inner)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            raise rope.refusal("low_freq_factor", f"is not below high_freq_factor = {high}")
        return RopeConfig(kind, theta, factor, original, low, high)
    if theta <= 1:
        raise config.refusal("rope_theta", f"gives theta = {theta}: yarn needs more than 1")
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_attention_factor(rope: _Reader, factor: float) -> float:
    """How much yarn sharpens attention: as given, or its paper's `0.1 ln(factor) + 1`."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    if rope.data.get("mscale") and rope.data.get("mscale_all_dim"):
        return magnitude(rope.positive("mscale")) / magnitude(rope.positive("mscale_all_dim"))
    return magnitude(1.0)


def _eos_ids(config: _Reader, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else config.json's."""
    path = directory / "generation_config.json"
    generation = _Reader(read_json(path) if path.is_file() else {}, str(path))
    source = generation if generation.has("eos_token_id") else config
    value = source.data.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise source.refusal("eos_token_id", f"is not of a vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _dtype(config: _Reader) -> str | None:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return None
    name = str(config.data[key]).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise config.refusal(key, "is not one of float32, float16, bfloat16")
    return name


def read_config(directory: Path) -> ModelConfig:
    """`config.json` and `generation_config.json` of a checkpoint; raises `CheckpointError`."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: no config.json: not a Hugging Face checkpoint")
    config = _Reader(read_json(directory / "config.json"), str(directory / "config.json"))
    if config.has("auto_map"):
        raise config.refusal("auto_map", "asks to run the checkpoint's own code, which is refused")
    architecture = _architecture(config)
    _refuse_unknown(config)
    if config.data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refusal("hidden_act", "is not implemented; silu is")
    dims = _dims(config)
    _refuse_windows(config, dims.num_layers)
    max_positions = config.whole("max_position_embeddings")
    rope = _rope(config, max_positions)
    if rope.kind == "yarn":  # a checkpoint may state the context before stretching
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    return ModelConfig(
        architecture=architecture,
        dims=dims,
        rope=rope,
        max_positions=max_positions,
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
        ties_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=_dtype(config),
        eos_ids=_eos_ids(config, directory, dims.vocab_size),
    )


def weights_dtype(directory: Path) -> str:
    """The floating dtype of most bytes of the weights, where config.json does not say."""
    sizes: dict[str, int] = {}
    for entry in tensor_entries(directory).values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
    dtype = _DTYPES.get(max(sizes, key=lambda name: sizes[name], default=""), "float32")
    return "float32" if dtype == "float64" else dtype


def describe(checkpoint: Path | str) -> CheckpointInfo:
    """What compose needs, after every check that needs no weights to be read."""
    directory = Path(checkpoint)
    config = read_config(directory)
    own_dtype = weights_dtype(directory)
    return CheckpointInfo(
        architecture=config.architecture,
        vocab_size=config.dims.vocab_size,
        max_positions=config.max_positions,
        dtype=config.dtype or own_dtype,
        eos_ids=config.eos_ids,
        has_tokenizer=(directory / "tokenizer.json").is_file(),
    )
