"""GPT-J (Wang and Komatsuzaki, 2021): parallel residuals of one norm, interleaved rotation."""

from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, Residuals, TensorNames
from slipstream.models.families import gpt2
from slipstream.models.family import family
from slipstream.models.reader import Reader

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}


def read_rotary_dim(
    config: Reader, max_positions: int, head_size: int
) -> tuple[RopeConfig, RopeConfig]:
    """Read how many numbers of a head rotate; theta is 10,000."""
    rotated = config.whole("rotary_dim", most=head_size)
    if rotated % 2:
        raise config.refusal("rotary_dim", "is odd")
    return RopeConfig(rotated=rotated), RopeConfig(rotated=rotated)


@family(
    "GPTJForCausalLM",
    keys="rotary_dim",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=read_rotary_dim,
    aliases=gpt2.KEYS,
    derived=gpt2.derived,
    tensors=TensorNames(NAMES, unread=(".attn.bias", ".attn.masked_bias")),
)
def gptj(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.ONE_NORM,
        interleaved=True,
        mlp_bias=True,
        gated=False,
        head_bias=True,
    )
