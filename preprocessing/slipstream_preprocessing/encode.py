"""Encode texts to token ids, for the preprocessing stage and for the bridge that serves text."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream_contract.errors import ContractError
from slipstream_contract.vocab import TokenBytes
from tokenizers import Tokenizer

from slipstream_preprocessing.chat import ChatTemplate, Message
from slipstream_preprocessing.tokenizer import (
    load_tokenizer,
    max_text_bytes_per_token,
    read_end_ids,
    read_pad_id,
)
from slipstream_preprocessing.words import decode_words, encode_exact, encode_words

_PROBE = 8  # characters per token: a first guess of the most


class Encoder:
    """A checkpoint's tokenizer, word encodings, chat template, and end and pad ids.

    Attributes:
        vocab: the bytes of every token.
        end_ids: ids that end a text, the tokenizer's EOS first; may be empty.
        pad_id: pads rectangular tensors.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        add_special_tokens: bool,
        max_model_len: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = TokenBytes.load(directory)
        self.end_ids = read_end_ids(directory, tokenizer)
        self.pad_id = read_pad_id(directory, tokenizer, self.end_ids)
        self._add_special_tokens = add_special_tokens
        self._max_model_len = max_model_len
        self._bytes_per_token = max_text_bytes_per_token(tokenizer, self.vocab)
        self._chat = ChatTemplate.load(directory)

    @classmethod
    def load(
        cls, directory: Path, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> "Encoder":
        """Read a checkpoint directory.

        Args:
            directory: has `tokenizer.json`, and optionally `tokenizer_config.json`,
                `generation_config.json`, `config.json` and `chat_template.jinja`.
            add_special_tokens: whether prompts get the tokenizer's special tokens, unless a
                request says otherwise.
            max_model_len: tokens of the model's context, if known; longer texts are refused.

        Raises FileNotFoundError, UnsupportedTokenizerError, ContractError (a broken chat template).
        """
        return cls(directory, load_tokenizer(directory), add_special_tokens, max_model_len)

    def encode(
        self, text: str, add_special_tokens: bool | None = None, field: str = "text_input"
    ) -> list[int]:
        """Return the token ids of a prompt. Raises ContractError if it is empty or cannot fit.

        `add_special_tokens` False: the text contains its special tokens; None: the default.
        `field`: what errors call the prompt.
        """
        if not text:
            raise ContractError(f"{field} is empty")
        self.check_size(len(text.encode()), field)
        self._check_start(text, field)
        add = self._adds(add_special_tokens)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add).ids
        if not ids:
            raise ContractError(f"{field} has no token of this model")
        return ids

    def _adds(self, wanted: bool | None) -> bool:
        return self._add_special_tokens if wanted is None else wanted

    def check_size(self, num_bytes: int, field: str = "text_input") -> None:
        """Raise ContractError if no text of `num_bytes` bytes fits, before tokenising it."""
        if self._max_model_len is None or self._bytes_per_token is None:
            return
        if num_bytes > self._max_model_len * self._bytes_per_token:
            least = -(-num_bytes // self._bytes_per_token)
            raise ContractError(
                f"{field} has {num_bytes} bytes, at least {least} tokens; "
                f"the context has {self._max_model_len}"
            )

    def _check_start(self, text: str, field: str) -> None:
        """Raise ContractError if the start of a text alone has too many tokens.

        Cutting a text changes the tokens at the cut, so a start must have a quarter more than fit.
        """
        if self._max_model_len is None:
            return
        size = _PROBE * self._max_model_len
        while 2 * size < len(text):
            ids = self.tokenizer.encode(text[:size], add_special_tokens=False).ids
            if len(ids) > 1.25 * self._max_model_len + _PROBE:
                raise ContractError(
                    f"{field} has {len(text.encode())} bytes, its first {size} characters have "
                    f"{len(ids)} tokens; the context has {self._max_model_len}"
                )
            size *= _PROBE

    def words(self, words: Iterable[bytes | str], field: str = "stop_words") -> list[list[int]]:
        """Return ids that stand for exactly the bytes of each word, for stop words.

        Empty words are skipped. Raises ContractError naming `field`.
        """
        return encode_exact(self.tokenizer, self.vocab, decode_words(words, field), field)

    def bad_words(self, words: Iterable[bytes | str], field: str = "bad_words") -> list[list[int]]:
        """Return the ids of each word as the tokenizer encodes it alone, without empty words."""
        return encode_words(self.tokenizer, decode_words(words, field))

    def bias_words(
        self,
        words: Iterable[bytes | str],
        field: str = "embedding_bias_words",
        add_special_tokens: bool | None = None,
    ) -> list[list[int]]:
        """Return the ids of each word, with the special tokens of a prompt, as in TensorRT-LLM.

        An empty word gets an empty entry, so that the list matches its weights.
        """
        texts = decode_words(words, field, keep_empty=True)
        encoded = encode_words(self.tokenizer, texts, self._adds(add_special_tokens))
        return [ids if text else [] for text, ids in zip(texts, encoded, strict=True)]

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Render the prompt of a conversation with the checkpoint's template.

        The template writes special tokens itself: encode with `add_special_tokens=False`.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)
