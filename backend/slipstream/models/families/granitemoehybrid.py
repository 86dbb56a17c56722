"""Granite 4 (IBM, 2025) where all layers attend: Granite MoE, or its shared MLP alone."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.families.granite import granite
from slipstream.models.families.granitemoe import EXPERT_KEYS, SHARED, TENSORS
from slipstream.models.families.granitemoeshared import SIZE, granitemoeshared
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope, read_rope

POSITIONS = "position_embedding_type"
# Of layers with states in the place of attention.
OF_STATES = "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand "
OF_STATES += "mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit layers_block_type"
DENSE = replace(TENSORS, own={"mlp": SHARED})


def is_dense(config: Reader) -> bool:
    """Return whether layers have the shared MLP alone."""
    return config.get("num_local_experts") == 0


def derived(config: Reader) -> Mapping[str, object]:
    """Return the size of the one MLP; refuse layers that do not attend."""
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds, count = config.get(key), config.whole("num_hidden_layers")
    known = isinstance(kinds, list) and all(x in ("attention", "full_attention") for x in kinds)
    if not isinstance(kinds, list) or not known or len(kinds) != count:
        raise config.refusal(key, f"is not a list of {count} attention: no other kind is served")
    return {"layer_types": None} | (
        {"intermediate_size": config.whole(SIZE)} if is_dense(config) else {}
    )


def read_ropes(config: Reader, most: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotation; without one, layers know positions by what each token sees alone."""
    if config.has(POSITIONS):
        config.refuse_unless(POSITIONS, "rope")
        return read_rope(config, most, head_size)
    return no_rope(config, most, head_size)


def names(config: Reader) -> TensorNames:
    """Return where tensors are, of a mixture or of MLPs."""
    return DENSE if is_dense(config) else TENSORS


@family(
    "GraniteMoeHybridForCausalLM",
    keys=f"{EXPERT_KEYS} {SIZE} {POSITIONS} {OF_STATES}",
    has_windows=False,
    read_ropes=read_ropes,
    derived=derived,
    tensors=names,
    said={"layer_types": ["attention"] * 32, "num_local_experts": 0, POSITIONS: "rope"},
)
def granitemoehybrid(config: Reader) -> Axes:
    """Read the factors of Granite, and experts if there are any."""
    return granite(config) if is_dense(config) else granitemoeshared(config)
