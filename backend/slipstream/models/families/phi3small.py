"""Phi-3-small (Abdin et al., 2024) is not served: its attention skips blocks, by head."""

from slipstream.models.family import refuses

refuses(
    "Phi3SmallForCausalLM",
    "is not supported: in every other layer each head sees other blocks of 64 tokens beside the "
    "last ones, for which no kernel has a mask",
)
