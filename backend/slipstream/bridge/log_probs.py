"""Log probs of tokens as JSON, in the format of Triton's vLLM backend.

Each token is an object: token id -> log prob, rank from 1 and text, of the token that is there and
then of the likeliest ones. JSON has no -inf: it is sent as -9999, as vLLM does.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec
import numpy as np
from slipstream_contract.log_probs import WHOLE, LogProbs

from slipstream import wire
from slipstream.bridge.pieces import Piece

LEAST = -9999.0
_LOGITS = 2  # of `Values.mode`, as `core.batch.TopMode` has it
Place = tuple[int, int, float, list[int], list[float]]
"""A token, its rank from 1 and its value; ids and values of the likeliest ones there."""


class Vocabulary(Protocol):
    """The part of TokenBytes that this module needs."""

    def raw(self, token_id: int) -> bytes:
        """Return a token's bytes."""


def sum_of(piece: Piece) -> float:
    """Return the sum of the log probs of the tokens of a piece."""
    likely = [values.likely for values in piece.values if values.likely is not None]
    return float(sum(np.frombuffer(each.values, np.float32).sum(dtype=float) for each in likely))


class LogProbTexts:
    """Writes the log probs that one request wants, of the new tokens and of its prompt."""

    def __init__(self, wanted: LogProbs, vocab: Vocabulary, prompt: Sequence[int]) -> None:
        """Make a writer; `prompt` has the prompt's token ids."""
        self._wanted = wanted
        self._prompt = prompt
        self._is_prompt_sent = False
        self._text = lru_cache(4096)(lambda i: vocab.raw(i).decode(errors="replace"))

    def outputs(self, piece: Piece) -> bytes:
        """Return a list with an object for each new token."""
        parts = [(values.likely, values) for values in piece.values if values.likely is not None]
        places: list[Place] = []
        begin = 0
        for likely, values in parts:
            ids = piece.token_ids[begin : begin + likely.num]
            begin += likely.num
            rows = values.logits if self._wanted.top == WHOLE else None
            places += places_of(likely, ids, rows, values.mode)
        return msgspec.json.encode([self._entry(place) for place in places])

    def prompt(self, piece: Piece) -> bytes | None:
        """Return a list for the prompt's tokens, of which the first has null; None: not yet."""
        if self._wanted.prompt is None or self._is_prompt_sent or not piece.values:
            return None
        self._is_prompt_sent = True
        values, ids = piece.values[0], list(self._prompt[1:])
        if sum(likely.num for likely in values.prompt) != len(ids):
            return None  # it ended before its prompt was computed
        rows: list[bytes] | None = None
        if self._wanted.prompt == WHOLE:
            whole = b"".join(values.context)
            size = len(whole) // len(self._prompt)
            rows = [whole[i * size : (i + 1) * size] for i in range(len(ids))]
        entries: list[object] = [None]
        for likely in values.prompt:
            end = len(entries) - 1 + likely.num
            begin = len(entries) - 1
            part = None if rows is None else rows[begin:end]
            places = places_of(likely, ids[begin:end], part, values.mode & _LOGITS)
            entries += [self._entry(place) for place in places]
        return msgspec.json.encode(entries)

    def _entry(self, place: Place) -> dict[str, object]:
        token_id, rank, value, top_ids, top_values = place
        entry: dict[str, object] = {str(token_id): self._object(token_id, rank, value)}
        for number, (each, own) in enumerate(zip(top_ids, top_values, strict=True), start=1):
            if each != token_id:
                entry[str(each)] = self._object(each, number, own)
        return entry

    def _object(self, token_id: int, rank: int, value: float) -> dict[str, object]:
        value = LEAST if value == -math.inf else value
        return {"logprob": value, "rank": rank, "decoded_token": self._text(token_id)}


def places_of(
    likely: wire.Likely, ids: Sequence[int], rows: list[bytes] | None, mode: int
) -> Iterator[Place]:
    """Yield what is known at the place of each of some tokens.

    With `rows` of logits, one a token, all of the vocabulary is among the likeliest; `mode` is that
    of their `wire.Values`.
    """
    shape = likely.num, likely.num_top
    top_ids = np.frombuffer(likely.top_ids, np.int32).reshape(shape).tolist()
    top_values = np.frombuffer(likely.top_values, np.float32).reshape(shape).tolist()
    ranks = np.frombuffer(likely.ranks, np.int32).tolist()
    values = np.frombuffer(likely.values, np.float32).tolist()
    for i, token_id in enumerate(ids):
        top = top_ids[i], top_values[i]
        yield token_id, ranks[i], values[i], *(top if rows is None else _whole(rows[i], mode))


def _whole(row: bytes, mode: int) -> tuple[list[int], list[float]]:
    """Return all token ids by falling logit, equal ones by rising id, and the value of each."""
    logits = np.frombuffer(row, np.float32)
    order = np.argsort(-logits, kind="stable")
    values = logits.astype(np.float64)
    if not mode & _LOGITS:
        highest = values.max()
        values = values - (highest + np.log(np.exp(values - highest).sum()))
    return order.tolist(), values[order].tolist()
