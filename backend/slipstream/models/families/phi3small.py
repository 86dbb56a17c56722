"""Phi-3-small (Abdin et al., 2024): heads skip blocks of tokens in all but every n-th layer.

Gates and what they multiply take turns in one matrix, and are cut off before they meet. Numbers of
muP (Yang et al., 2022) scale embeddings, scores and logits. transformers lacks it.
"""

from collections.abc import Mapping
from math import inf

from slipstream.models.axes import Activation, Axes, NormKind, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_magnified_rope
from slipstream.models.skips import KEYS, read_skips
from slipstream.models.transforms import in_halves

# Tokens of the published vocabulary that stand for nothing: those that fill it up, and four of
# cl100k_base that the model does not use.
SILENT = (100256, 100258, 100259, 100260, 100264, 100265, *range(100267, 100352))
CLASS = own_class(
    "phi3small",
    vocab_size=100352,
    max_position_embeddings=8192,
    rope_embedding_base=1e6,
    rope_position_scale=1.0,
    rope_scaling=None,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_act="gegelu",
    gegelu_limit=20.0,
    gegelu_pad_to_256=True,
    ff_dim_multiplier=None,
    ff_intermediate_size=None,
    blocksparse_homo_head_pattern=False,
    blocksparse_block_size=64,
    blocksparse_num_local_blocks=16,
    blocksparse_vert_stride=8,
    dense_attention_every_n_layers=2,
    layer_norm_epsilon=1e-5,
    mup_use_scaling=True,
    mup_width_multiplier=8.0,
    mup_embedding_multiplier=10.0,
    mup_attn_multiplier=1.0,
    dummy_token_indices=None,
    tie_word_embeddings=True,
    eos_token_id=100257,
)
_INNER, _PADDED = 14336, 256
NAMES = {
    "model.norm": "model.final_layernorm",
    **joined("self_attn.query_key_value"),
    "self_attn.o_proj": "self_attn.dense",
    **joined("mlp.up_proj", "mlp"),
}
# Gates and what they multiply are rows by turns.
_TURNS = {
    f"mlp.{name}_proj.{kind}": in_halves for name in ("gate", "up") for kind in ("weight", "bias")
}
_KEYS = (
    "rope_position_scale gegelu_limit gegelu_pad_to_256 ff_dim_multiplier ff_intermediate_size "
    "mup_use_scaling mup_width_multiplier mup_embedding_multiplier mup_attn_multiplier "
    "dummy_token_indices"
)


def derived(config: Reader) -> Mapping[str, object]:
    """Return the width of the MLP, and how positions are stretched, by the names of others."""
    found: dict[str, object] = {}
    multiplier, inner = config.get("ff_dim_multiplier"), config.get("ff_intermediate_size")
    if multiplier is not None and inner is not None:
        raise config.refusal("ff_dim_multiplier", f"contradicts ff_intermediate_size = {inner}")
    if multiplier is not None:
        inner = config.whole("ff_dim_multiplier") * (config.whole("hidden_size") // 3) * 2
        if config.flag("gegelu_pad_to_256", default=True):
            inner = -(-inner // _PADDED) * _PADDED
    found["intermediate_size"] = _INNER if inner is None else inner
    scale = config.positive("rope_position_scale")
    if config.has("rope_scaling") and scale != 1:
        raise config.refusal("rope_position_scale", "does not go with rope_scaling")
    if scale != 1:
        found["rope_scaling"] = {"type": "linear", "factor": scale}
    return found


def silent(config: Reader) -> tuple[int, ...]:
    """Return the tokens that are never said: those that the file lists, else the published."""
    vocab_size, listed = config.whole("vocab_size"), config.wholes("dummy_token_indices")
    if listed is None:
        return tuple(i for i in SILENT if i < vocab_size)
    if any(i >= vocab_size for i in listed):
        why = f"has tokens outside of a vocabulary of {vocab_size}"
        raise config.refusal("dummy_token_indices", why)
    return tuple(sorted(set(listed)))


def multiplier(config: Reader, key: str) -> float:
    """Read a number of muP; null and 0 leave out what it multiplies."""
    return config.positive(key) if config.get(key) else 1.0


@family(
    "Phi3SmallForCausalLM",
    config_class=CLASS,
    keys=f"{_KEYS} {' '.join(KEYS)}",
    activations={"gegelu": Activation.GEGELU},
    has_windows=False,
    read_ropes=read_magnified_rope,
    aliases="rms_norm_eps=layer_norm_epsilon rope_theta=rope_embedding_base",
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.GROUPS, joins_gate_up=True, changed=_TURNS),
)
def phi3small(config: Reader) -> Axes:
    """Read the numbers of muP, where gates are cut off, and what heads skip."""
    size = config.whole("hidden_size") / config.whole("num_attention_heads")
    scaled = config.flag("mup_use_scaling", default=True)
    return Axes(
        norm=NormKind.LAYER,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=config.positive("mup_attn_multiplier") / size if scaled else None,
        gate_limit=config.positive("gegelu_limit") if config.has("gegelu_limit") else inf,
        skips=read_skips(config),
        embedding_scale=multiplier(config, "mup_embedding_multiplier"),
        logit_scale=1 / multiplier(config, "mup_width_multiplier"),
        silent=silent(config),
    )
