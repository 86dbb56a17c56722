"""CodeGen (Nijkamp et al., 2022): GPT-J with q, v and k in four blocks of one matrix."""

from typing import TYPE_CHECKING

from slipstream.models.axes import ACTIVATIONS, Axes, Change, TensorNames, joined
from slipstream.models.families import gpt2, gptj
from slipstream.models.family import family
from slipstream.models.reader import Reader

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = 4  # of heads, as the processors that it was trained on


def block(which: int) -> Change:
    """Return the change that takes q, v or k (0, 1, 2) out of every block."""

    def change(x: "Tensor") -> "Tensor":
        return x.view(_BLOCKS, 3, -1, *x.shape[1:])[:, which].flatten(0, 1)

    return change


NAMES = {**gptj.NAMES, **joined("attn.qkv_proj")}
PLACES = {"q_proj": 0, "v_proj": 1, "k_proj": 2}


@family(
    "CodeGenForCausalLM",
    keys="rotary_dim n_ctx",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=gptj.read_rotary_dim,
    aliases=gpt2.KEYS,
    derived=gpt2.derived,
    tensors=TensorNames(
        NAMES,
        unread=(".attn.bias", ".attn.causal_mask", ".attn.masked_bias"),
        changed={f"self_attn.{name}.weight": block(place) for name, place in PLACES.items()},
    ),
)
def codegen(config: Reader) -> Axes:
    """Return GPT-J's axes."""
    return gptj.gptj(config)
