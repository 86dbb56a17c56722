"""Encode the words of a request (stop, bad, bias) as token ids.

Stop words are matched on bytes, so their ids must stand for exactly the bytes of the word, without
the space that SentencePiece models put before a text (`"\\n"` would become `" \\n"`). Bad words and
bias words act on tokens and are encoded as the model sees them in a text.
"""

from collections.abc import Iterable

from slipstream_contract.errors import ContractError, clip
from slipstream_contract.inputs import decode
from slipstream_contract.vocab import TokenBytes
from tokenizers import Tokenizer

# Put before a word to get its tokens inside a text: at least one does not merge with it.
_ANCHORS = ("\n", "a", ".", "0")


def decode_words(words: Iterable[bytes | str], field: str, keep_empty: bool = False) -> list[str]:
    """Decode words from UTF-8, without empty words unless `keep_empty`.

    Raises ContractError for invalid UTF-8. Limits of number and length are checked elsewhere.
    """
    texts = [decode(f"{field}[{index}]", word) for index, word in enumerate(words)]
    return texts if keep_empty else [text for text in texts if text]


def encode_words(
    tokenizer: Tokenizer, words: Iterable[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """Return the token ids of each word as the tokenizer encodes it alone."""
    return [tokenizer.encode(word, add_special_tokens=add_special_tokens).ids for word in words]


def encode_exact(
    tokenizer: Tokenizer, vocab: TokenBytes, words: Iterable[str], field: str
) -> list[list[int]]:
    """Return token ids that stand for exactly the bytes of each word.

    Raises ContractError if the model's tokens cannot spell a word.
    """
    encoded = []
    for word in words:
        ids = _exact(tokenizer, vocab, word)
        if ids is None:
            raise ContractError(f"{field}: {clip(word)} cannot be written in this model's tokens")
        encoded.append(ids)
    return encoded


def _exact(tokenizer: Tokenizer, vocab: TokenBytes, word: str) -> list[int] | None:
    data = word.encode()
    alone: list[int] = tokenizer.encode(word, add_special_tokens=False).ids
    if _bytes(vocab, alone) == data:
        return alone
    for anchor in _ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False).ids
        whole = tokenizer.encode(anchor + word, add_special_tokens=False).ids
        rest = whole[len(before) :]
        if whole[: len(before)] == before and _bytes(vocab, rest) == data:
            return rest
    single = vocab.single_bytes
    if all(byte in single for byte in data):
        return [single[byte] for byte in data]
    # With WordPiece every token starts with a space: texts contain the word only with it.
    return alone if _bytes(vocab, alone).lstrip(b" ") == data else None


def _bytes(vocab: TokenBytes, token_ids: list[int]) -> bytes:
    return b"".join(vocab.raw(i) for i in token_ids)
