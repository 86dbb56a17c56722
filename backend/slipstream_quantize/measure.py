"""Bits that an opened checkpoint needs for a byte of text, with few logits in memory at once."""

import math
from collections.abc import Iterator

import torch
from slipstream.layers.residual import Residual
from tokenizers import Tokenizer
from torch import Tensor

from slipstream_quantize.opened import Opened, Running

LOGIT_BYTES = 1 << 26  # of logits in fp32 at once: 64 positions of a vocabulary of 262,144


def num_bytes(tokenizer: Tokenizer, pieces: Tensor) -> int:
    """Count the bytes of pieces without their first tokens, which nothing predicts."""
    return sum(len(tokenizer.decode(piece[1:]).encode()) for piece in pieces.tolist())


def logits_of(opened: Opened, sums: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield positions of `sums [length, hidden]` behind the last block, and their logits.

    Logits are `[count, vocab]` fp32, `LOGIT_BYTES` at most: those of all positions may be more
    than the model itself.
    """
    at_once = max(1, LOGIT_BYTES // (4 * opened.plan.model.dims.vocab_size))
    for first in range(0, len(sums), at_once):
        rows = slice(first, first + at_once)
        yield rows, opened.decoder.logits(Residual(sums[rows])).float()


@torch.inference_mode()
def bits_per_byte(opened: Opened, tokenizer: Tokenizer, pieces: Tensor) -> float:
    """Return the bits of all tokens but each piece's first, over the bytes of the text."""
    bits = 0.0
    for ids, sums in Running(opened, pieces).sums():
        for rows, logits in logits_of(opened, sums[:-1]):
            found = logits.log_softmax(-1).gather(1, ids[1:][rows, None])
            bits -= float(found.sum()) / math.log(2)
    return bits / num_bytes(tokenizer, pieces)
