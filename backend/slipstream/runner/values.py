"""Whole logits of a step's rows, and values of tokens of prompts; few requests want them.

A step with rows that want values of a prompt keeps all tokens in its last layer and runs eagerly.
The head then runs over so many of these tokens at a time that their logits take `LOGITS_BYTES`,
whatever the length of the prompt; what is kept of them goes to host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from torch import Tensor

from slipstream.core.batch import Batch, PromptAsk, PromptValues, Row, TopMode
from slipstream.kernels.sampling.sample import ROW
from slipstream.kernels.sampling.top_log_probs import (
    ASK,
    ASK_WORDS,
    TopResults,
    processed_after,
    top_log_probs,
)
from slipstream.layers.residual import Residual
from slipstream.layers.sliced import ROWS
from slipstream.runner.log_probs import Ask, Tops, asks_of
from slipstream.runner.sampler import SamplingInputs
from slipstream.wire import Likely

assert ROW.fields is not None
_RESULT = ROW.fields["result"][1] // 4
LOGITS_BYTES = 1 << 26  # of one piece of a prompt


def piece_rows(vocab_size: int, itemsize: int) -> int:
    """Return how many rows of logits are made at a time: a multiple of `ROWS` where many fit."""
    rows = LOGITS_BYTES // (vocab_size * itemsize)
    return max(1, rows if rows < ROWS else rows // ROWS * ROWS)


def largest_piece(vocab_size: int, itemsize: int) -> tuple[Batch, int]:
    """Return a step with the largest piece of a prompt, and how many tokens that has."""
    count = piece_rows(vocab_size, itemsize)
    ids = pack([0] * count)
    row = Row(0, 0, ids, 0, (), False, SamplingParams(max_tokens=1), 0, 0, num_prompt=count + 1)
    row = msgspec.structs.replace(row, prompt=PromptAsk(0, ids, 1, 0, has_logits=False))
    return Batch((row,), 0), count


class Piece(NamedTuple):
    """Tokens of a step that the head runs over at a time, for values of a prompt."""

    row: int
    first: int  # of the step's tokens
    begin: int  # of the row's tokens whose values are wanted
    end: int


def pieces_of(batch: Batch, most: int) -> list[Piece]:
    """Cut what rows want of their prompts into pieces of at most `most` tokens."""
    found, end_of_row = [], 0
    for number, row in enumerate(batch.rows):
        begin_of_row, end_of_row = end_of_row, end_of_row + len(row.token_ids)
        if (ask := row.prompt) is None:
            continue
        # What follows the prompt is output, after a preemption.
        size = min(len(row.token_ids), row.num_prompt - row.start) - ask.first
        first = begin_of_row + ask.first
        found += [
            Piece(number, first + begin, begin, min(size, begin + most))
            for begin in range(0, size, most)
        ]
    return found


def rows_of_piece(hidden: Tensor, first: int, count: int, is_sliced: bool) -> Residual:
    """Return so many rows of `hidden` from `first` on; sliced, a multiple of `ROWS`."""
    index = torch.arange(first, first + count, device=hidden.device)
    if is_sliced:
        index = torch.cat([index, index[-1:].expand(-len(index) % ROWS)])
    return Residual(hidden[index])


def has_prompts(batch: Batch) -> bool:
    """Return whether rows of a batch want values of their prompts."""
    return batch.may_have_tops and any(row.prompt is not None for row in batch.rows)


def wants_logits(batch: Batch) -> bool:
    """Return whether rows of a batch want whole logits of their samples."""
    return batch.may_have_tops and any(row.logits_mode >= 0 for row in batch.rows)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that the device copies to."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass
class _Part:
    """What a row's `PromptAsk` gets, once the step is complete."""

    start: int
    ask: PromptAsk
    num_positions: int
    tops: list[TopResults] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # in the model's dtype, on the host

    def read(self) -> PromptValues:
        likely = None
        if self.ask.num_top >= 0:
            columns = (np.concatenate([x.numpy() for x in c]) for c in zip(*self.tops, strict=True))
            ids, values, ranks, own = columns if self.tops else (np.zeros(0, np.int32),) * 4
            data = (ids.tobytes(), values.tobytes(), ranks.tobytes(), own.tobytes())
            most = self.tops[0].top_ids.shape[1] if self.tops else self.ask.num_top
            likely = Likely(len(self.ask.next_ids), most, *data)
        logits = b"".join(x.float().numpy().tobytes() for x in self.logits)
        return PromptValues(self.start, self.num_positions, likely, logits)


class Beside:
    """Values of one step beside its samples and their likeliest tokens."""

    def __init__(self) -> None:
        self._logits: dict[int, Tensor] = {}
        self._parts: dict[int, _Part] = {}

    def read(self) -> tuple[dict[int, bytes], dict[int, PromptValues]]:
        """Return whole logits by sample, and values of prompts by row; the step is complete."""
        logits = {i: row.float().numpy().tobytes() for i, row in self._logits.items()}
        return logits, {i: part.read() for i, part in self._parts.items()}

    @torch.inference_mode()
    def copy_logits(
        self,
        batch: Batch,
        logits: Tensor,
        places: list[int],
        inputs: SamplingInputs,
        counts: Tensor,
        sampled: Tensor,
    ) -> None:
        """Copy rows of logits `[n, vocab]` to the host, for samples that want them whole.

        `places` are their rows of each sample; the other arguments are those of `top_log_probs`.
        """
        rows = [row for row in batch.rows if row.samples]
        for sample, row in enumerate(rows):
            if row.logits_mode < 0:
                continue
            at = slice(places[sample], places[sample] + 1)
            made = logits[at]
            if row.logits_mode & TopMode.PROCESSED:
                record = inputs.rows[at]
                token = sampled[record[:, _RESULT].long()]
                edited, temperature = processed_after(made, record, inputs.edits, counts, token)
                made = edited / temperature
            out = _empty((made.shape[1],), made.dtype, made.device)
            self._logits[sample] = out.copy_(made[0], non_blocking=True)

    @torch.inference_mode()
    def make_prompts(
        self,
        batch: Batch,
        hidden: Tensor,
        head: Callable[[Residual], Tensor],
        dtype: torch.dtype,
        vocab_size: int,
        is_sliced: bool,
    ) -> None:
        """Make the values of prompts that rows of a batch want.

        Args:
            batch: the step.
            hidden: `[tokens, hidden]`, behind the last block, row by row.
            head: from hidden states to logits.
            dtype, vocab_size: of the logits.
            is_sliced: whether the head takes multiples of `ROWS` alone.
        """
        for number, row in enumerate(batch.rows):
            if (ask := row.prompt) is not None:
                size = min(len(row.token_ids), row.num_prompt - row.start) - ask.first
                self._parts[number] = _Part(row.start + ask.first, ask, size)
        for piece in pieces_of(batch, piece_rows(vocab_size, dtype.itemsize)):
            part, count = self._parts[piece.row], piece.end - piece.begin
            logits = head(rows_of_piece(hidden, piece.first, count, is_sliced))[:count]
            self._keep(part, logits, list(part.ask.next_ids[piece.begin : piece.end]))

    @staticmethod
    def _keep(part: _Part, logits: Tensor, next_ids: list[int]) -> None:
        """Keep what is wanted of some rows of logits; the last may have no next token."""
        ask, device = part.ask, logits.device
        if ask.has_logits:
            out = _empty(tuple(logits.shape), logits.dtype, device)
            part.logits.append(out.copy_(logits, non_blocking=True))
        if ask.num_top < 0 or not next_ids:
            return
        records = np.zeros(len(next_ids), ASK)
        records["row"] = np.arange(len(next_ids))
        records["num_top"], records["mode"], records["token"] = ask.num_top, ask.mode, next_ids
        words = torch.from_numpy(records.view(np.int32).reshape(-1, ASK_WORDS)).to(device)
        count, i32, f32 = len(next_ids), torch.int32, torch.float32
        most = min(ask.num_top, logits.shape[1])
        found = TopResults(
            _empty((count, most), i32, device),
            _empty((count, most), f32, device),
            _empty((count,), i32, device),
            _empty((count,), f32, device),
        )
        nothing = torch.zeros((1, 1), dtype=torch.int32, device=device)
        rows = torch.zeros((1, ROW.itemsize // 4), dtype=torch.int32, device=device)
        counts = nothing.to(torch.int16).expand(0, logits.shape[1]).contiguous()
        edits = nothing.expand(0, 2).contiguous()
        top_log_probs(logits, words, rows, edits, counts, nothing[0].long(), found)
        part.tops.append(found)


def ask_values(
    tops: Tops,
    batch: Batch,
    logits: Tensor,
    places: NDArray[np.int64],
    given: tuple[SamplingInputs, Tensor, Tensor],
    first: int,
    beside: Beside | None,
) -> list[Ask]:
    """Launch what rows of a batch want beside their samples, and return what `tops` will have.

    Args:
        tops: where likeliest tokens go, from `first` on.
        batch: the step.
        logits: `[n, vocab]`.
        places: which of them are those of the samples, in order.
        given: how they are sampled, the counts of penalties, and the samples.
        first: place of the first sample.
        beside: where whole logits go; None: no row wants any.
    """
    asks = asks_of(batch)
    if asks:
        tops.launch(logits, asks, places, *given, first)
    if beside is not None:
        beside.copy_logits(batch, logits, places.tolist(), *given)
    return asks
