"""VaultGemma (Google, 2025): Gemma 2 without the norms behind attention and MLP."""

from dataclasses import replace

from slipstream.models.axes import Activation, Axes, TensorNames
from slipstream.models.families.gemma2 import derived, gemma2
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family(
    "VaultGemmaForCausalLM",
    keys="attention_bias query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping",
    activation_key="hidden_activation",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    derived=derived,
    tensors=TensorNames({"post_attention_layernorm": "pre_feedforward_layernorm"}),
)
def vaultgemma(config: Reader) -> Axes:
    """Read what Gemma 2 has."""
    return replace(gemma2(config), norms_behind=False)
