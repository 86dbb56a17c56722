"""Tokens of one response as text: a pure function, since all state travels with the response."""

import codecs
from collections.abc import Iterable

from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import TokenBytes

ONE_SHOT = StreamState()


def detokenize(
    vocab: TokenBytes,
    token_ids: Iterable[int],
    state: StreamState = ONE_SHOT,
    skip_special: bool = True,
) -> str:
    """Text that these tokens complete; the default state is a whole text.

    Bytes of a character that has only begun are left to the next response, whose state holds them
    as its tail (`slipstream_contract.vocab.state_after`); at the end they become U+FFFD.
    """
    data, _ = vocab.join(token_ids, state.is_first, skip_special, state.drop_bytes)
    text, _ = codecs.utf_8_decode(state.tail + data, "replace", state.is_last)
    return text
