"""ChatGLM 1 (Zeng et al., 2023) by its own code: two positions, prompts that see both ways."""

from collections.abc import Mapping

from slipstream.core.two_way import TwoWay
from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import (
    Activation,
    Axes,
    NormKind,
    QkvOrder,
    Residuals,
    TensorNames,
    joined,
)
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader

CLASS = own_class(
    "chatglm", vocab_size=130528, hidden_size=4096, num_layers=28, num_attention_heads=32,
    inner_hidden_size=16384, layernorm_epsilon=1e-5, max_sequence_length=2048, pre_seq_len=None,
    prefix_projection=False, quantization_bit=0, quantization_embeddings=False,
    position_encoding_2d=True, bos_token_id=130004, eos_token_id=130005, mask_token_id=130000,
    gmask_token_id=130001, tie_word_embeddings=False,
)  # fmt: skip
NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers": "transformer.layers",
    "model.norm": "transformer.final_layernorm",
    **joined("attention.query_key_value"),
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
ALIASES = "num_hidden_layers=num_layers intermediate_size=inner_hidden_size "
ALIASES += "max_position_embeddings=max_sequence_length rms_norm_eps=layernorm_epsilon"
TOKENS = ("bos_token_id", "gmask_token_id", "mask_token_id")


def derived(config: Reader) -> Mapping[str, object]:
    """Return what no key says."""
    config.refuse_unless("position_encoding_2d", value=True)
    return {"num_key_value_heads": None, "head_dim": None, "activation": "gelu_tanh"}


def read_ropes(config: Reader, most: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of half of each head by each position, twice."""
    if head_size % 4:
        why = f"gives heads of {head_size}: two halves of pairs need a multiple of 4"
        raise config.refusal("hidden_size", why)
    return (RopeConfig(rotated=head_size, has_two=True),) * 2


def token(config: Reader, key: str) -> int:
    """Return a token of the vocabulary."""
    found, size = config.whole(key), config.whole("vocab_size")
    if found >= size:
        raise config.refusal(key, f"is outside of a vocabulary of {size}")
    return found


@family(
    "ChatGLM1Model",
    keys=f"position_encoding_2d {' '.join(TOKENS)}",
    activation_key="activation",
    activations={"gelu_tanh": Activation.GELU_TANH},
    has_windows=False,
    read_ropes=read_ropes,
    aliases=ALIASES,
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.HEADS),
    config_class=CLASS,
)
def chatglm1(config: Reader) -> Axes:
    """Read the tokens that say what prompts see; the number of layers decides the factor."""
    begin, *masks = (token(config, key) for key in TOKENS)
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.OF_NORMS,
        sum_scale=(2 * config.whole("num_hidden_layers")) ** 0.5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        two_way=TwoWay(begin, tuple(masks)),
    )
