"""Bits that an opened checkpoint needs for a byte of text."""

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor

from slipstream_quantize.opened import Opened, Running


def num_bytes(tokenizer: Tokenizer, pieces: Tensor) -> int:
    """Count the bytes of pieces without their first tokens, which nothing predicts."""
    return sum(len(tokenizer.decode(piece[1:]).encode()) for piece in pieces.tolist())


@torch.inference_mode()
def bits_per_byte(opened: Opened, tokenizer: Tokenizer, pieces: Tensor) -> float:
    """Return the bits of all tokens but each piece's first, over the bytes of the text."""
    bits = 0.0
    for ids, logits in Running(opened, pieces).logits():
        found = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
        bits -= float(found.sum()) / math.log(2)
    return bits / num_bytes(tokenizer, pieces)
