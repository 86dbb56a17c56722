"""Texts of single tokens: as log probs show them, and as they join to an answer."""

from collections.abc import Callable, Iterable
from functools import lru_cache

from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import TokenBytes
from slipstream_postprocessing.detokenize import detokenize_next

_RUNNING = StreamState(is_last=False)


class WholeTexts(dict[int, str | None]):
    """Token id -> its text inside an answer; None: its bytes are not whole characters."""

    def __init__(self, vocab: TokenBytes, skip_special: bool) -> None:
        super().__init__()
        self._vocab = vocab
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._vocab.visible(token_id, False, self._skip_special).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class TokenTexts:
    """Texts and bytes of the tokens of one vocabulary."""

    def __init__(self, vocab: TokenBytes) -> None:
        self.vocab = vocab
        self.of: Callable[[int], tuple[str, bytes]] = lru_cache(1 << 16)(self._make)
        self._whole = {flag: WholeTexts(vocab, flag) for flag in (True, False)}

    def decoder(self, skip_special: bool) -> "Decoder":
        """Return a decoder of one answer."""
        return Decoder(self.vocab, self._whole[skip_special], skip_special)

    def _make(self, token_id: int) -> tuple[str, bytes]:
        data = self.vocab.raw(token_id)
        return data.decode(errors="replace"), data


class Decoder:
    """The text of one answer, token by token: as `detokenize_next`, and faster."""

    def __init__(self, vocab: TokenBytes, whole: WholeTexts, skip_special: bool) -> None:
        self._vocab = vocab
        self._whole = whole
        self._skip_special = skip_special
        self._state = _RUNNING

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return what tokens add that are not the last."""
        return "".join(map(self.next, token_ids))

    def next(self, token_id: int) -> str:
        """Return what a token adds that is not the last."""
        state = self._state
        if not (state.is_first or state.tail):
            text = self._whole[token_id]
            if text is not None:
                return text
        text, self._state = detokenize_next(self._vocab, (token_id,), state, self._skip_special)
        return text

    def last(self, token_ids: Iterable[int], drop_bytes: int = 0) -> str:
        """Return what the last tokens, at most one, add; `drop_bytes` of it are cut at its end."""
        state = self._state._replace(is_last=True, drop_bytes=drop_bytes)
        text, self._state = detokenize_next(self._vocab, token_ids, state, self._skip_special)
        return text
