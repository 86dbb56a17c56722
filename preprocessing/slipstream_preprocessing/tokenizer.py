"""Load a checkpoint's tokenizer for the `tokenizers` library; find its end and pad ids.

Only `tokenizer.json` is executed. As in transformers 5, its own post-processor decides whether a
BOS token is added; `tokenizer_config.json` adds special tokens and names their roles.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from slipstream_contract.contained import contained
from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.tokenizer_config import AddedToken, TokenizerConfig
from slipstream_contract.vocab import TokenBytes
from tokenizers import Tokenizer

_FIELDS = AddedToken.__struct_fields__


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer, without truncation or padding.

    Raises FileNotFoundError without a `tokenizer.json`, UnsupportedTokenizerError for a bad one.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; compose makes it of other vocabularies")
    try:
        with contained():
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise UnsupportedTokenizerError(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = TokenizerConfig.load(directory)
    tokenizer.encode_special_tokens = config.splits_special
    _add_configured_tokens(tokenizer, config, path)
    return tokenizer


def _add_configured_tokens(tokenizer: Tokenizer, config: TokenizerConfig, path: Path) -> None:
    """Add the tokens that only `tokenizer_config.json` has."""
    present = {
        token_id: AddedToken(**{name: getattr(token, name) for name in _FIELDS})
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    added = (msgspec.structs.asdict(token) for token in config.additions(present))
    tokenizer.add_tokens([tokenizers.AddedToken(**fields) for fields in added])
    for token_id, token in config.numbered.items():
        found = tokenizer.token_to_id(token.content)
        if token_id not in present and found != token_id:
            raise UnsupportedTokenizerError(
                f"{path.parent}: tokenizer_config.json wants {token.content!r} as token "
                f"{token_id}, it is {found} after those of tokenizer.json"
            )


def read_end_ids(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a text: the tokenizer's EOS first, then those of the model.

    The model's are in `generation_config.json`, else `config.json`: one id or a list. Ids outside
    the model's vocabulary, which it cannot generate, are left out.
    """
    eos = TokenizerConfig.load(directory).text("eos_token")
    ids = [] if eos is None else [tokenizer.token_to_id(eos)]
    config = _read_object(directory / "config.json")
    for source in (_read_object(directory / "generation_config.json"), config):
        value = source.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    size = (config.get("text_config") or config).get("vocab_size")
    known = (int(i) for i in ids if i is not None and (size is None or int(i) < size))
    return tuple(dict.fromkeys(known))


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist."""
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


def read_pad_id(directory: Path, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> int:
    """Return the id of the tokenizer's pad token, else the first end id, else 0."""
    pad = TokenizerConfig.load(directory).text("pad_token")
    token_id = None if pad is None else tokenizer.token_to_id(pad)
    if token_id is None:
        return end_ids[0] if end_ids else 0
    return int(token_id)


def max_text_bytes_per_token(tokenizer: Tokenizer, vocab: TokenBytes) -> int | None:
    """Return the most UTF-8 bytes of a text that one token can stand for; None: no known bound.

    With a bound, a text of too many bytes is refused before it is tokenised. There is none if a
    normaliser, a pre-tokenizer, an unknown token or an added token can swallow any number of bytes.
    """
    factor = _shrinking(_state(tokenizer.normalizer)) * _dropping(_state(tokenizer.pre_tokenizer))
    strips = any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    if not factor or strips or len(vocab.single_bytes) < 256:
        return None
    return factor * vocab.max_token_bytes


def _state(part: Any) -> dict[str, Any]:
    """Return the JSON of a normaliser or pre-tokenizer."""
    return {"type": None} if part is None else json.loads(part.__getstate__())


def _shrinking(spec: dict[str, Any]) -> int:
    """Return by what factor a normaliser can shorten a text at most; 0: no known limit."""
    match spec:
        case {"type": None | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return 3  # a "▁" in the text has 3 bytes and becomes a space of 1
        case {"type": "NFC"}:
            return 9  # decomposing and composing change the bytes by a factor of 3 each
        case {"type": "Sequence", "normalizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _shrinking(part)
            return factor
    return 0


def _dropping(spec: dict[str, Any]) -> int:
    """Return the factor of `_shrinking` for pre-tokenizers; 0 if they drop characters."""
    match spec:
        case {"type": None | "ByteLevel" | "Digits"}:
            return 1
        case {"type": "Split", "behavior": str(behavior)} if behavior != "Removed":
            return 1
        case {"type": "Metaspace"}:
            return 3
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _dropping(part)
            return factor
    return 0
