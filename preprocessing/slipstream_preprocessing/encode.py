"""Text to token ids, for both wirings: the preprocessing stage and the bridge that serves text."""

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

_PROBE = 8  # characters that a token has at most, as a first guess


class Encoder:
    """One checkpoint's tokenizer, word encodings, chat template, and end and pad ids.

    Attributes:
        vocab: the bytes of every token.
        end_ids: ids that end a text, the tokenizer's own first; perhaps none.
        pad_id: fills up rectangular tensors.
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
            directory: holds `tokenizer.json`; `tokenizer_config.json`, `generation_config.json`,
                `config.json` and `chat_template.jinja` are read where they exist.
            add_special_tokens: whether prompts get the tokens that the tokenizer puts around them,
                where a request does not say.
            max_model_len: tokens of the model's context, if known: longer texts are refused early.

        Raises FileNotFoundError, UnsupportedTokenizerError, ContractError (a broken chat template).
        """
        return cls(directory, load_tokenizer(directory), add_special_tokens, max_model_len)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a prompt. Raises ContractError if it is empty or cannot fit.

        `add_special_tokens` False: the text holds its special tokens already; None: as `load` says.
        """
        if not text:
            raise ContractError("text_input is empty")
        self.check_size(len(text.encode()))
        self._check_beginning(text)
        add = self._adds(add_special_tokens)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add).ids
        if not ids:
            raise ContractError("text_input holds no token of this model")
        return ids

    def _adds(self, wanted: bool | None) -> bool:
        return self._add_special_tokens if wanted is None else wanted

    def check_size(self, num_bytes: int) -> None:
        """Raise ContractError if no text of so many bytes fits, before anything is made of it."""
        if self._max_model_len is None or self._bytes_per_token is None:
            return
        if num_bytes > self._max_model_len * self._bytes_per_token:
            least = -(-num_bytes // self._bytes_per_token)
            raise ContractError(
                f"text_input has {num_bytes} bytes, at least {least} tokens; "
                f"the context has {self._max_model_len}"
            )

    def _check_beginning(self, text: str) -> None:
        """Refuse a text whose beginning alone has too many tokens, without encoding it all.

        A cut changes the tokens about it, so a beginning must have a quarter more than fit.
        """
        if self._max_model_len is None:
            return
        size = _PROBE * self._max_model_len
        while 2 * size < len(text):
            ids = self.tokenizer.encode(text[:size], add_special_tokens=False).ids
            if len(ids) > 1.25 * self._max_model_len + _PROBE:
                raise ContractError(
                    f"text_input has {len(text.encode())} bytes, its first {size} characters have "
                    f"{len(ids)} tokens; the context has {self._max_model_len}"
                )
            size *= _PROBE

    def words(self, words: Iterable[bytes | str], field: str = "stop_words") -> list[list[int]]:
        """Ids that stand for exactly the bytes of each word, for stop words.

        Empty words are skipped. Raises ContractError naming `field`.
        """
        return encode_exact(self.tokenizer, self.vocab, decode_words(words, field), field)

    def bad_words(self, words: Iterable[bytes | str], field: str = "bad_words") -> list[list[int]]:
        """Ids of each word as the tokenizer encodes it alone; empty words are skipped."""
        return encode_words(self.tokenizer, decode_words(words, field))

    def bias_words(
        self,
        words: Iterable[bytes | str],
        field: str = "embedding_bias_words",
        add_special_tokens: bool | None = None,
    ) -> list[list[int]]:
        """Ids of each word, with the special tokens that a prompt gets, as old clients have it.

        An empty word has an empty entry, so that the list still matches its weights.
        """
        texts = decode_words(words, field, keep_empty=True)
        encoded = encode_words(self.tokenizer, texts, self._adds(add_special_tokens))
        return [ids if text else [] for text, ids in zip(texts, encoded, strict=True)]

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, by the checkpoint's template.

        Templates write special tokens themselves: encode it with `add_special_tokens=False`.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)
