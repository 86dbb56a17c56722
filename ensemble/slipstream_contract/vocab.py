"""Token ids as bytes: what a token adds to the decoded text, without the tokenizer that made it.

The engine matches stop words on these bytes, postprocessing joins them. A token is bytes and not
text because one character may be spread over several tokens; the 0 to 3 bytes of a character that
has only begun (the tail) travel from one response to the next. Concatenated, the texts of a stream
equal the one-shot decode of the `tokenizers` library, with one difference: where a model emits byte
tokens (`<0xE4>`) that are no valid UTF-8, that library turns the whole run into U+FFFD, valid
characters included. A stream that has sent them cannot: here only invalid bytes become U+FFFD.
"""

import codecs
from array import array
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from slipstream_contract.decoder import UnsupportedTokenizerError, read_chain
from slipstream_contract.errors import clip
from slipstream_contract.stream_state import StreamState
from slipstream_contract.tokenizer_config import AddedToken, TokenizerConfig, number

MAX_TOKEN_ID = (1 << 22) - 1  # there is an entry for each id below the largest


class TokenBytes:
    """The bytes of every token of one tokenizer. Immutable, safe to share between threads."""

    def __init__(self, pieces: Mapping[int, str], special: Iterable[int], decoder: object) -> None:
        """Build the table.

        Args:
            pieces: token id -> its text in the vocabulary; ids may have gaps.
            special: ids that `skip_special` leaves out.
            decoder: the `decoder` of a `tokenizer.json`, decoded JSON; None joins pieces by spaces.
        """
        self._chain = chain = read_chain(decoder)
        self.size = max(pieces, default=-1) + 1
        self.special = frozenset(special)
        self._known = bytearray(self.size)
        self._offsets = array("Q", [0])
        blob = bytearray()
        for token_id in range(self.size):
            piece = pieces.get(token_id)
            if piece is not None:
                self._known[token_id] = 1
                blob += chain.encode(piece)
            self._offsets.append(len(blob))
        self._blob = bytes(blob)
        self._pieces = dict(pieces) if chain.is_positional else {}
        self.max_token_bytes = max((b - a for a, b in pairwise(self._offsets)), default=0)
        ordinary = (i for i in range(self.size) if i not in self.special)
        # Byte -> a token that stands for it alone; complete where a model can write any text.
        self.single_bytes = {
            self._blob[self._offsets[i]]: i
            for i in ordinary
            if self._offsets[i + 1] - self._offsets[i] == 1
        }

    @classmethod
    def load(cls, directory: Path) -> "TokenBytes":
        """Read `tokenizer.json` and, if it is there, `tokenizer_config.json` for special tokens.

        Raises FileNotFoundError without a `tokenizer.json`, UnsupportedTokenizerError otherwise.
        """
        path = directory / "tokenizer.json"
        try:
            spec = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        except msgspec.DecodeError as error:
            raise UnsupportedTokenizerError(f"{path}: {error}") from None
        ids, present = spec.model.ids(), {token.id: token for token in spec.added_tokens}
        added = number(ids, present, TokenizerConfig.load(directory).additions(present))
        pieces = {token_id: piece for piece, token_id in ids.items()}
        pieces |= {token_id: token.content for token_id, token in added.items()}
        if min(pieces, default=0) < 0:
            raise UnsupportedTokenizerError(f"{path}: token id {min(pieces)} is negative")
        if max(pieces, default=0) > MAX_TOKEN_ID:
            largest = max(pieces)
            raise UnsupportedTokenizerError(
                f"{path}: token id {largest} of {clip(pieces[largest])} is above {MAX_TOKEN_ID}"
            )
        try:
            return cls(pieces, (i for i, token in added.items() if token.special), spec.decoder)
        except UnsupportedTokenizerError as error:
            raise UnsupportedTokenizerError(f"{path}: {error}") from None

    def raw(self, token_id: int) -> bytes:
        """Return a token's bytes after other tokens; a special token is its own text.

        Empty for an id that the tokenizer does not have: models pad their vocabulary.
        """
        if not 0 <= token_id < self.size:
            return b""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]]

    def visible(self, token_id: int, is_first: bool, skip_special: bool = True) -> bytes:
        """Return what the token adds to the decoded text, which is empty so far if `is_first`."""
        if skip_special and token_id in self.special:
            return b""
        data = self.raw(token_id)
        if not is_first:
            return data
        if token_id in self._pieces:
            return self._chain.encode(self._pieces[token_id], is_first=True)
        return data.removeprefix(self._chain.strip)

    def join(
        self,
        token_ids: Iterable[int],
        is_first: bool,
        skip_special: bool = True,
        drop_bytes: int = 0,
    ) -> tuple[bytes, bool]:
        """Return what the tokens add to the text, and whether the next token is still its first.

        `drop_bytes` are cut from the end of what the last of them adds.
        """
        parts: list[bytes]
        if not is_first:  # as nearly all are: then a token's bytes do not depend on others
            hidden = self.special if skip_special else ()
            parts = [b"" if token_id in hidden else self.raw(token_id) for token_id in token_ids]
            return _cut(parts, drop_bytes), False
        parts = []
        for token_id in token_ids:
            data = self.visible(token_id, is_first, skip_special)
            parts.append(data)
            is_first = is_first and not self._begins_text(token_id, skip_special)
        return _cut(parts, drop_bytes), is_first

    def _begins_text(self, token_id: int, skip_special: bool) -> bool:
        """Return whether the tokens after this one no longer count as first."""
        if not 0 <= token_id < self.size or (skip_special and token_id in self.special):
            return False
        # A decoder that counts tokens counts an empty one too; one that cuts the text does not.
        return (
            bool(self._known[token_id]) if self._chain.is_positional else self.raw(token_id) != b""
        )


def _cut(parts: list[bytes], drop_bytes: int) -> bytes:
    """Join all parts without the last `drop_bytes` bytes of the last one."""
    if drop_bytes and parts:
        parts[-1] = parts[-1][: max(0, len(parts[-1]) - drop_bytes)]
    return b"".join(parts)


def split_incomplete(data: bytes) -> tuple[bytes, bytes]:
    """Split into (whole, tail): a tail of 0 to 3 bytes of a character that later bytes complete.

    Bytes that are invalid whatever follows stay in the whole part.
    """
    _, size = codecs.utf_8_decode(data, "replace", False)
    return data[:size], data[size:]


def state_after(
    vocab: TokenBytes, token_ids: Iterable[int], state: StreamState, skip_special: bool = True
) -> StreamState:
    """Return the state of the response after this one: its tail, and whether it is the first.

    A stream that began with special tokens alone has no text yet, so the next one is first too.
    """
    data, is_first = vocab.join(token_ids, state.is_first, skip_special, state.drop_bytes)
    tail = split_incomplete(state.tail + data)[1]
    return StreamState(state.slot, state.number + 1, is_first, tail=tail)


# --- tokenizer.json -------------------------------------------------------------------------------


class _NumberedToken(AddedToken, frozen=True, kw_only=True):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # Unigram has the list

    def ids(self) -> dict[str, int]:
        """Return piece -> token id."""
        if isinstance(self.vocab, dict):
            return self.vocab
        return {piece: token_id for token_id, (piece, _) in enumerate(self.vocab)}


class _TokenizerFile(msgspec.Struct):
    """Parts of `tokenizer.json` that are read; merges, the large rest, are skipped."""

    model: _Model
    added_tokens: list[_NumberedToken] = []
    decoder: Any = None
