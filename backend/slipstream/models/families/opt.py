"""OPT (Zhang et al., 2022), Galactica: learned positions from row 2 on, a plain MLP of ReLU."""

from collections.abc import Mapping

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, TensorNames
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope

NAMES = {
    "model.embed_tokens": "model.decoder.embed_tokens",
    "model.embed_positions": "model.decoder.embed_positions",
    "model.layers": "model.decoder.layers",
    "model.norm": "model.decoder.final_layer_norm",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return what no key says; refuse norms behind, and embeddings of another width (350m)."""
    config.refuse_unless("do_layer_norm_before", True)
    config.refuse_unless("_remove_final_layer_norm", False)
    config.refuse_unless("word_embed_proj_dim", config.whole("hidden_size"))
    return {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5}


@family(
    "OPTForCausalLM",
    keys="enable_bias layer_norm_elementwise_affine do_layer_norm_before _remove_final_layer_norm "
    "word_embed_proj_dim dropout layerdrop init_std",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=no_rope,
    aliases="intermediate_size=ffn_dim",
    derived=derived,
    tensors=TensorNames(NAMES, optional="model."),
)
def opt(config: Reader) -> Axes:
    """Read whether matrices have biases, and norms weights."""
    bias = config.flag("enable_bias", default=True)
    has_weights = config.flag("layer_norm_elementwise_affine", default=True)
    return Axes(
        norm=NormKind.LAYER if has_weights else NormKind.LAYER_ALONE,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated=False,
        learned_positions=True,
        position_offset=2,
    )
