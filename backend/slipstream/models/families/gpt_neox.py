"""GPT-NeoX (Black et al., 2022), Pythia: parallel residuals, a quarter of each head rotates."""

from collections.abc import Mapping

from slipstream.models.axes import (
    ACTIVATIONS,
    Axes,
    NormKind,
    QkvOrder,
    Residuals,
    TensorNames,
    joined,
)
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn": "attention",
    **joined("attention.query_key_value"),
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return nothing; refuse sizes of heads that transformers' attention does not read."""
    heads = config.whole("num_attention_heads")
    config.refuse_unless("head_dim", config.whole("hidden_size") // heads)
    return {}


@family(
    "GPTNeoXForCausalLM",
    keys="use_parallel_residual attention_bias",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases="rms_norm_eps=layer_norm_eps rope_theta=rotary_emb_base "
    "partial_rotary_factor=rotary_pct",
    derived=derived,
    tensors=TensorNames(
        NAMES,
        unread=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        qkv=QkvOrder.HEADS,
    ),
    gguf=GgufForm(
        "gptneox",
        qkv=QkvOrder.BLOCKS,
        is_partial=True,
        flags={"attention_bias": "attn_qkv.bias"},
        numbers={"use_parallel_residual": "use_parallel_residual"},
    ),
)
def gpt_neox(config: Reader) -> Axes:
    """Read whether residuals are parallel, and whether attention's matrices have biases."""
    bias = config.flag("attention_bias", default=True)
    is_parallel = config.flag("use_parallel_residual", default=True)
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.TWO_NORMS if is_parallel else Residuals.SERIAL,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        gated=False,
    )
