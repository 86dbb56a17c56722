"""What accuracy.py measures on an opened checkpoint: bits a byte, KL, greedy tokens, MMLU."""

import math
from dataclasses import dataclass

import torch
from accuracy_models import Question
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.residual import Residual
from slipstream_quantize.measure import logits_of
from slipstream_quantize.opened import BLOCK_SIZE, Opened, Running
from slipstream_quantize.text import pieces
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

PIECE, PROMPT, GREEDY = 512, 64, 100  # tokens
KL_PIECES, PROMPTS = 4, 10
_AT_ONCE = 16  # questions


@dataclass
class Truth:
    """What the model in 16 bits says, with which all others are compared."""

    text: Tensor  # [s, PIECE]
    num_bytes: int
    sums: list[Tensor]  # behind the last block, of the first pieces: [PIECE - 1, hidden] each
    bits: list[float]  # of each piece
    written: Tensor  # [PROMPTS, PROMPT + GREEDY], greedy behind the prompts
    answers: list[int]


def bits_and_kl(
    opened: Opened, text: Tensor, cache: str, truth: list[Tensor] | None
) -> tuple[list[float], float | None, list[Tensor]]:
    """Return bits of each piece, the mean KL of a token's distribution in nats, and the sums.

    Args:
        opened: the model.
        text: token ids `[s, length]`.
        cache: the format of the KV cache.
        truth: the sums of the first pieces in 16 bits, whose logits this model's own norm and head
            make once more: no recipe changes these, and logits are hundreds of times as large.
            None: no KL, and the sums are kept.
    """
    bits, kl, kept, count = [], 0.0, [], 0
    for i, (ids, sums) in enumerate(Running(opened, text, cache).sums()):
        bits.append(0.0)
        for rows, logits in logits_of(opened, sums[:-1]):
            found = logits.log_softmax(-1)
            bits[i] -= float(found.gather(1, ids[1:][rows, None]).sum()) / math.log(2)
            if truth is not None and i < KL_PIECES:
                before = opened.decoder.logits(Residual(truth[i][rows])).float().log_softmax(-1)
                kl += float(functional.kl_div(found, before, reduction="sum", log_target=True))
                count += len(found)
        if truth is None and i < KL_PIECES:
            kept.append(sums[:-1].clone())
    return bits, kl / count if count else None, kept


def greedy(opened: Opened, prompts: Tensor, count: int) -> Tensor:
    """Return the prompts `[s, length]` with `count` greedy tokens behind each."""
    found = prompts.to(opened.plan.device)
    step = _Steps(opened, len(found), found.shape[1] + count)
    after = step(found, 0)
    for _ in range(count):
        found = torch.cat((found, after), 1)
        after = step(after, found.shape[1] - 1)
    return found


class _Steps:
    """Steps of `s` sequences of at most `most` tokens, whose keys and values are cached."""

    def __init__(self, opened: Opened, s: int, most: int) -> None:
        plan, blocks = opened.plan, -(-most // BLOCK_SIZE)
        self._opened, self._count = opened, s
        shape = plan.kv.layer_shape(blocks * s)
        self._caches = [
            torch.zeros(shape, dtype=plan.cache_dtype, device=plan.device)
            for _ in plan.model.windows
        ]
        tables = torch.arange(s * blocks, dtype=torch.int32, device=plan.device)
        self._tables = tables.view(s, blocks)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        """Return the likeliest token behind each of `ids [s, n]`, from position `start` on."""
        plan, s, n = self._opened.plan, self._count, ids.shape[1]
        numbers = {"dtype": torch.int32, "device": plan.device}
        positions = torch.arange(start, start + n, device=plan.device).repeat(s)
        firsts = self._tables[:, 0].long() * BLOCK_SIZE
        num_decodes = s if n == 1 else 0
        rows = StepRows(
            positions=positions,
            slots=positions + firsts.repeat_interleave(n),
            block_tables=self._tables,
            query_starts=torch.arange(s - num_decodes + 1, **numbers) * n,
            lengths=torch.full((s,), start + n, **numbers),
            num_decodes=num_decodes,
            max_queries=0 if num_decodes else n,
        )
        windows = plan.model.windows
        of = {w: AttentionInputs.of(plan.attention, self._caches[0], rows, w) for w in {*windows}}
        every = [of[window] for window in windows]
        sums = self._opened.decoder.hidden(ids.flatten(), every, self._caches).values
        last = sums.view(s, n, -1)[:, -1].contiguous()
        return self._opened.decoder.logits(Residual(last)).argmax(-1, keepdim=True)


def agreement(opened: Opened, written: Tensor, cache: str) -> tuple[float, float]:
    """Return the part of greedy tokens that agree, and the mean of those before the first other.

    Each token is chosen behind the 16-bit model's own. Up to the first that differs, that is what
    a model that writes by itself would choose.
    """
    same = []
    for ids, sums in Running(opened, written, cache).sums():
        likeliest = [logits.argmax(-1) for _, logits in logits_of(opened, sums[PROMPT - 1 : -1])]
        same.append(torch.cat(likeliest) == ids[PROMPT:])
    every = torch.stack(same)
    return float(every.float().mean()), float(every.long().cumprod(1).sum(1).float().mean())


def answers(opened: Opened, tokenizer: Tokenizer, questions: list[Question]) -> list[int]:
    """Return the likeliest of ` A` to ` D` behind each question."""
    letters = [tokenizer.encode(f" {x}", add_special_tokens=False).ids[-1] for x in "ABCD"]
    ids = [tokenizer.encode(question.prompt).ids for question in questions]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = [0] * len(ids)
    for first in range(0, len(order), _AT_ONCE):
        chosen = order[first : first + _AT_ONCE]
        most = len(ids[chosen[-1]])
        padded = torch.tensor([ids[i] + [0] * (most - len(ids[i])) for i in chosen])
        for i, (_, sums) in zip(chosen, Running(opened, padded).sums(), strict=True):
            end = len(ids[i])
            logits = opened.decoder.logits(Residual(sums[end - 1 : end]))[0]
            found[i] = int(logits[letters].argmax())
    return found


def text_of(tokenizer: Tokenizer, texts: list[str], length: int, most: int) -> Tensor:
    """Return pieces of the held-out text."""
    return pieces(tokenizer, texts, length, most, "the held-out text")
