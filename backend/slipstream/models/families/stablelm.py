"""StableLM (Bellagente et al., 2024): layer norms, a quarter of each head rotates."""

from slipstream.models.axes import Axes, NormKind, QkNorms, Residuals, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = {"self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm"}


@family(
    "StableLmForCausalLM",
    keys="use_qkv_bias qk_layernorm use_parallel_residual",
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases="rms_norm_eps=layer_norm_eps",
    tensors=TensorNames(NAMES),
    gguf=GgufForm(
        "stablelm",
        is_partial=True,
        norms_each_head=True,
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        numbers={"use_parallel_residual": "use_parallel_residual"},
    ),
)
def stablelm(config: Reader) -> Axes:
    """Read biases, residuals, and whether each head has norms of its own."""
    is_parallel = config.flag("use_parallel_residual", default=False)
    has_norms = config.flag("qk_layernorm", default=False)
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.ONE_NORM if is_parallel else Residuals.SERIAL,
        qk_norms=QkNorms.LAYER_HEADS if has_norms else QkNorms.NONE,
        qkv_bias=config.flag("use_qkv_bias", default=False),
    )
