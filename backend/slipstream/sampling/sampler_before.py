"""From the logits of a step to one token a row: edits, then the draw."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.sample_before import edit_logits, sample


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each of `r` rows is drawn, and `e` edits of single logits; all on the logits' device."""

    temperature: Tensor  # [r] f32, 0 is greedy
    top_k: Tensor  # [r] i32, 0 is all
    top_p: Tensor  # [r] f32
    min_p: Tensor  # [r] f32
    seeds: Tensor  # [r] i64
    counters: Tensor  # [r] i64, number of the token in its output
    edit_rows: Tensor  # [e] i64
    edit_tokens: Tensor  # [e] i64
    edit_factors: Tensor  # [e] f32
    edit_addends: Tensor  # [e] f32


def draw(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Edit `logits [r, vocab]` in place, draw: `(token_ids i64, log_probs f32, is_finite bool)`."""
    if len(inputs.edit_rows) > 0:
        edit_logits(
            logits,
            inputs.edit_rows,
            inputs.edit_tokens,
            inputs.edit_factors,
            inputs.edit_addends,
        )
    return sample(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seeds,
        inputs.counters,
    )
