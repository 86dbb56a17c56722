"""Make a tokenizer of tiktoken's ranks: a file of lines, each a token in base64 and its rank."""

import base64
import binascii
from pathlib import Path

from slipstream_contract.decoder import BYTE_CHARACTERS
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token, from 0 without gaps. Raises ValueError for other files."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        text, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number} is no token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2 and so on")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"byte {missing[0]} has no token")
    return ranks


def tokenizer_of_ranks(ranks: dict[bytes, int], pattern: str, composes: bool) -> Tokenizer:
    """Return the tokenizer, which adds nothing to a text; `pattern` cuts texts before merges.

    If it `composes`, letters and their accents become one character first (NFC).
    """
    vocabulary = {_written(token): rank for token, rank in ranks.items()}
    pairs = (_halves(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1)
    merges = sorted((rank, _written(a), _written(b)) for rank, a, b in filter(None, pairs))
    model = BPE(vocabulary, [(a, b) for _, a, b in merges], ignore_merges=True)
    tokenizer = Tokenizer(model)
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _written(token: bytes) -> str:
    return "".join([BYTE_CHARACTERS[byte] for byte in token])


def _halves(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[int, bytes, bytes] | None:
    """Return the merge that makes a token: what merges of lower ranks leave of its bytes.

    None if they leave more than two parts: no merge makes it, only a whole piece of text is it.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        least = min(found)
        if least >= rank:
            return None
        at = found.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return rank, parts[0], parts[1]
