"""Falcon's first files (2023), `RWForCausalLM`: other keys of config.json, the same tensors."""

from collections.abc import Mapping

from slipstream.models.axes import Activation, Axes
from slipstream.models.config_class import own_class
from slipstream.models.families import falcon
from slipstream.models.family import family
from slipstream.models.reader import Reader

CLASS = own_class(
    "RefinedWeb", "RefinedWebModel", vocab_size=65024, hidden_size=4544, n_layer=32, n_head=71,
    n_head_kv=None, layer_norm_epsilon=1e-5, multi_query=False, alibi=False, bias=False,
    parallel_attn=False, apply_residual_connection_post_layernorm=False, rope_theta=10000.0,
    max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=11,
)  # fmt: skip


def derived(config: Reader) -> Mapping[str, object]:
    """Return the layout, by Falcon's later keys: heads of keys and values are those of 40B's."""
    is_new = config.has("num_kv_heads")
    own: dict[str, object] = {"new_decoder_architecture": is_new, "activation": "gelu"}
    own |= {"parallel_attn": True} if is_new else {}
    config.data = {**config.data, **own}
    return {**own, **falcon.derived(config)}


@family(
    "RWForCausalLM",
    config_class=CLASS,
    keys="alibi multi_query parallel_attn bias",
    activation_key="activation",
    activations={"gelu": Activation.GELU},
    has_windows=False,
    read_ropes=falcon.ropes,
    aliases="num_attention_heads=n_head num_hidden_layers=n_layer num_kv_heads=n_head_kv "
    "hidden_size=n_embed rms_norm_eps=layer_norm_epsilon",
    derived=derived,
    tensors=falcon.tensors,
    said={"multi_query": True, "parallel_attn": True},
)
def refined_web(config: Reader) -> Axes:
    """Read what Falcon's later files say otherwise."""
    return falcon.falcon(config)
