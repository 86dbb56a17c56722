"""Decode the tokens of a response to text: pure, since all state travels with the response."""

import codecs
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import TokenBytes

ONE_SHOT = StreamState()


def detokenize(
    vocab: TokenBytes,
    token_ids: Iterable[int],
    state: StreamState = ONE_SHOT,
    skip_special: bool = True,
) -> str:
    """Return the text that these tokens complete; the default state is for a whole text.

    Bytes of an incomplete character are left to the next response, whose state carries them as its
    tail (`slipstream_contract.vocab.state_after`); at the end they become U+FFFD.
    """
    return detokenize_next(vocab, token_ids, state, skip_special)[0]


def detokenize_next(
    vocab: TokenBytes, token_ids: Iterable[int], state: StreamState, skip_special: bool
) -> tuple[str, StreamState]:
    """Return the text as `detokenize` does, and the state after these tokens.

    Only `is_first` and `tail` can change; most often neither does, and `state` itself is returned.
    """
    data, is_first = vocab.join(token_ids, state.is_first, skip_special, state.drop_bytes)
    data = state.tail + data
    text, size = codecs.utf_8_decode(data, "replace", state.is_last)
    tail = data[size:]
    if is_first != state.is_first or tail != state.tail:
        state = state._replace(is_first=is_first, tail=tail)
    return text, state


def detokenize_batch(
    vocab: TokenBytes,
    tokens: NDArray[np.int32],
    lengths: NDArray[np.int32],
    skip_special: bool = True,
) -> list[str]:
    """Decode every row as a whole text.

    Args:
        vocab: the bytes of every token.
        tokens: int32[..., length], rows padded at the end.
        lengths: int32[...], the number of tokens of each row.
        skip_special: leave special tokens out.

    Raises ContractError for too many tokens, lengths that do not fit, and negative ids.
    """
    if tokens.ndim == 0:
        raise ContractError("TOKENS_BATCH is a scalar")
    rows = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
    counts: list[int] = lengths.reshape(-1).tolist()
    if len(counts) != len(rows):
        raise ContractError(f"SEQUENCE_LENGTH has {len(counts)} values for {len(rows)} rows")
    limits.check_count("TOKENS_BATCH", tokens.size, limits.MAX_DETOKENIZED, "token ids")
    texts = []
    for row, count in zip(rows, counts, strict=True):
        if not 0 <= count <= row.size:
            raise ContractError(f"SEQUENCE_LENGTH is {count}, TOKENS_BATCH has {row.size} tokens")
        token_ids: list[int] = row[:count].tolist()
        check_ids("TOKENS_BATCH", token_ids)
        texts.append(detokenize(vocab, token_ids, skip_special=skip_special))
    return texts


def check_ids(tensor: str, token_ids: Sequence[int]) -> None:
    """Raise ContractError for negative ids; ids beyond the vocabulary decode to nothing."""
    if token_ids and min(token_ids) < 0:
        raise ContractError(f"{tensor} holds the negative id {clip(min(token_ids))}")
