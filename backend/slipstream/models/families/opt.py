"""OPT (Zhang et al., 2022), Galactica: learned positions from row 2 on, a plain MLP of ReLU.

The one of 350M has norms of the sum, none before the head, and embeddings of another width.
"""

from collections.abc import Mapping

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, Residuals, TensorNames
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
    "model.project_in": "model.decoder.project_in",
    "model.project_out": "model.decoder.project_out",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return what no key says."""
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
    tensors=TensorNames(NAMES),
)
def opt(config: Reader) -> Axes:
    """Read whether matrices have biases, and norms weights, and where norms stand."""
    is_before = config.flag("do_layer_norm_before", default=True)
    has_last = is_before and not config.flag("_remove_final_layer_norm", default=False)
    hidden = config.whole("hidden_size")
    width = config.whole("word_embed_proj_dim", hidden)
    bias = config.flag("enable_bias", default=True)
    has_weights = config.flag("layer_norm_elementwise_affine", default=True)
    return Axes(
        norm=NormKind.LAYER if has_weights else NormKind.LAYER_ALONE,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated=False,
        residuals=Residuals.SERIAL if is_before else Residuals.INTO_NORMS,
        embedding_size=0 if width == hidden else width,
        last_norm=has_last,
        learned_positions=True,
        position_offset=2,
    )
