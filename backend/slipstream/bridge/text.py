"""Convert text in process, by the functions of preprocessing and postprocessing."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from slipstream_contract.ids import pack
from slipstream_contract.request import GenerateRequest, Words
from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import TokenBytes
from slipstream_postprocessing.detokenize import detokenize, detokenize_next
from slipstream_preprocessing.encode import Encoder
from slipstream_preprocessing.tokenizer import load_tokenizer, read_end_ids

from slipstream.bridge.pieces import Piece

_NUM_THREADS = 2
_SHORT = 1000  # characters


def is_short(texts: Iterable[str]) -> bool:
    """Return whether encoding takes less time than waking another thread for it."""
    return sum(map(len, texts)) <= _SHORT


def make_encoders() -> ThreadPoolExecutor:
    """Return threads that encode long prompts, for which `execute` must not wait.

    All are started here: a thread started by a later request would look like a leak of that
    request.
    """
    pool = ThreadPoolExecutor(_NUM_THREADS, "encode")
    barrier = threading.Barrier(_NUM_THREADS)
    for started in [pool.submit(barrier.wait) for _ in range(_NUM_THREADS)]:
        started.result()
    return pool


class Text:
    """The conversion between text and token ids of one checkpoint. Thread-safe."""

    def __init__(
        self, checkpoint: Path, add_special_tokens: bool, skip_special: bool, max_model_len: int
    ) -> None:
        """Read the tokenizer. Raises what `Encoder.load` does."""
        self._encoder = Encoder.load(checkpoint, add_special_tokens, max_model_len)
        self._skip_special = skip_special

    @property
    def vocab(self) -> TokenBytes:
        """The bytes of every token."""
        return self._encoder.vocab

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self._encoder.end_ids

    def check_sizes(self, texts: np.ndarray | None) -> None:
        """Raise ContractError if a text is far too long, by its length, before it is decoded."""
        for text in () if texts is None else texts.flat:
            if isinstance(text, bytes):
                self._encoder.check_size(len(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt. Raises ContractError."""
        return self._encoder.encode(text)

    def encode_request(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with token ids for prompt and words. Raises ContractError."""
        encoder, add_special_tokens = self._encoder, request.add_special_tokens
        sampling = request.encoded(
            encoder.end_ids,
            encoder.bad_words(request.words.bad),
            encoder.bias_words(request.words.biased, add_special_tokens=add_special_tokens),
        )
        token_ids = pack(encoder.encode(request.text, add_special_tokens))
        return msgspec.structs.replace(request, prompt=token_ids, sampling=sampling, words=Words())

    def whole(
        self,
        token_ids: Sequence[int],
        drop_bytes: int,
        is_last: bool,
        skip_special: bool | None = None,
    ) -> str:
        """Return a text from its first token on; None: special tokens as configured.

        Bytes of an incomplete character are left out, or at the end U+FFFD.
        """
        skip = self._skip_special if skip_special is None else skip_special
        state = StreamState(is_last=is_last, drop_bytes=drop_bytes)
        return detokenize(self.vocab, token_ids, state, skip)

    def detokenizer(self, skip_special: bool | None = None) -> "Detokenizer":
        """Return a detokenizer for a sequence; None: special tokens as the model is configured."""
        skip = self._skip_special if skip_special is None else skip_special
        return Detokenizer(self.vocab, skip)


class Detokenizer:
    """The text of one sequence, response by response."""

    def __init__(self, vocab: TokenBytes, skip_special: bool) -> None:
        self._vocab = vocab
        self._skip_special = skip_special
        self._state = StreamState(is_last=False)

    def decode(self, prompt: Sequence[int], piece: Piece, is_last: bool) -> str:
        """Return the text that the tokens add; `prompt` comes before them and may be empty."""
        token_ids = [*prompt, *piece.token_ids] if prompt else piece.token_ids
        state = self._state
        if is_last != state.is_last or piece.drop_bytes != state.drop_bytes:
            state = state._replace(is_last=is_last, drop_bytes=piece.drop_bytes)
        text, self._state = detokenize_next(self._vocab, token_ids, state, self._skip_special)
        return text


def load_end_ids(checkpoint: Path) -> tuple[int, ...]:
    """Return the ids that end a text of this checkpoint; none without a tokenizer."""
    if not (checkpoint / "tokenizer.json").is_file():
        return ()
    return read_end_ids(checkpoint, load_tokenizer(checkpoint))
