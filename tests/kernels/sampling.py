"""Rows to draw, and what was drawn, for the tests of `sample` on either device."""

from dataclasses import dataclass

import numpy as np
import torch
from slipstream.kernels.sampling.sample import EDIT_WORDS, ROW, ROW_WORDS, sample
from torch import Tensor


def make_rows(count: int, **fields: object) -> Tensor:
    """`ROW` records as words: temperature 1, no filter, no penalty, results in order."""
    rows = np.zeros(count, ROW)
    rows["temperature"] = rows["top_p"] = rows["repetition"] = 1
    rows["slot"] = rows["result"] = np.arange(count)
    for name, value in fields.items():
        rows[name] = value
    return torch.from_numpy(rows.view(np.int32).reshape(-1, ROW_WORDS))


@dataclass
class Drawn:
    """Results of `sample`."""

    token_ids: Tensor
    log_probs: Tensor
    is_finite: Tensor

    @staticmethod
    def empty(size: int, device: torch.device | str = "cpu") -> "Drawn":
        """Values that no draw has."""
        return Drawn(
            torch.full((size,), -7, device=device),
            torch.full((size,), 7.0, device=device),
            torch.zeros(size, dtype=torch.bool, device=device),
        )


def draw_rows(
    logits: Tensor,
    rows: Tensor,
    edits: Tensor | None = None,
    counts: Tensor | None = None,
    into: Drawn | None = None,
    mirrors: tuple[Tensor, ...] = (),
    is_reference: bool = False,
) -> Drawn:
    """`sample` on the logits' device; edits and counts may be left out where no row has them."""
    device = logits.device
    if edits is None:
        edits = torch.zeros((0, EDIT_WORDS), dtype=torch.int32)
    if counts is None:
        counts = torch.zeros((0, logits.shape[1]), dtype=torch.int16)
    drawn = into or Drawn.empty(len(logits), device)
    run = sample.reference if is_reference else sample
    inputs = (rows.to(device), edits.to(device), counts.to(device))
    run(logits, *inputs, drawn.token_ids, drawn.log_probs, drawn.is_finite, mirrors)
    return drawn
