"""A checkpoint's tokenizer as the `tokenizers` library runs it, and the ids that end and pad.

Only `tokenizer.json` is executed. As in transformers 5 its own post-processor decides whether a BOS
token is put in front; `tokenizer_config.json` adds special tokens and names their roles.
"""

import json
from pathlib import Path
from typing import Any

from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.vocab import (
    SPECIAL_ROLES,
    TokenBytes,
    read_tokenizer_config,
    special_token,
)
from tokenizers import AddedToken, Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer, never truncating or padding.

    Raises FileNotFoundError without a `tokenizer.json`, UnsupportedTokenizerError for a bad one.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        hint = "; convert tokenizer.model first" if (directory / "tokenizer.model").exists() else ""
        raise FileNotFoundError(f"{path} does not exist{hint}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise UnsupportedTokenizerError(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_configured_tokens(tokenizer, read_tokenizer_config(directory), path)
    return tokenizer


def _add_configured_tokens(tokenizer: Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Tokens that only the configuration knows; their ids follow those of `tokenizer.json`."""
    known = tokenizer.get_added_tokens_decoder()
    for key, value in sorted((config.get("added_tokens_decoder") or {}).items(), key=_by_id):
        if int(key) in known:
            continue
        flags = {name: value.get(name, False) for name in ("single_word", "lstrip", "rstrip")}
        is_special = bool(value.get("special", False))
        normalized = value.get("normalized", not is_special)
        token = AddedToken(value["content"], normalized=normalized, special=is_special, **flags)
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([token])
        if tokenizer.token_to_id(value["content"]) != int(key):
            raise UnsupportedTokenizerError(
                f"{path.parent}: tokenizer_config.json wants {value['content']!r} as token {key}, "
                f"it is {tokenizer.token_to_id(value['content'])} after those of tokenizer.json"
            )
    contents = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for name in SPECIAL_ROLES:
        content = special_token(config, name)
        if content and content not in contents and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _by_id(item: tuple[str, Any]) -> int:
    return int(item[0])


def read_end_ids(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a text: the tokenizer's EOS first, then those of the model's own configuration.

    `generation_config.json` goes before `config.json`; either may hold one id or a list.
    """
    eos = special_token(read_tokenizer_config(directory), "eos")
    ids = [] if eos is None else [tokenizer.token_to_id(eos)]
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def read_pad_id(directory: Path, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> int:
    """The tokenizer's pad token, else its first end id, else 0."""
    pad = special_token(read_tokenizer_config(directory), "pad")
    token_id = None if pad is None else tokenizer.token_to_id(pad)
    if token_id is None:
        return end_ids[0] if end_ids else 0
    return int(token_id)


def max_text_bytes_per_token(tokenizer: Tokenizer, vocab: TokenBytes) -> int | None:
    """More UTF-8 bytes of a text than this never go into one token; None where no bound is known.

    So a text of far too many bytes can be refused before it is tokenised. There is no bound where a
    normaliser, a pre-tokenizer, an unknown token or an added token can swallow any number of bytes.
    """
    factor = _shrinking(_state(tokenizer.normalizer)) * _dropping(_state(tokenizer.pre_tokenizer))
    strips = any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    if not factor or strips or len(vocab.single_bytes) < 256:
        return None
    return factor * vocab.max_token_bytes


def _state(part: Any) -> dict[str, Any]:
    """JSON of a normaliser or pre-tokenizer."""
    return {"type": None} if part is None else json.loads(part.__getstate__())


def _shrinking(spec: dict[str, Any]) -> int:
    """How many times shorter a normaliser can make a text; 0: no limit is known."""
    match spec:
        case {"type": None | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return 3  # a "▁" of the text takes 3 bytes and becomes a space
        case {"type": "NFC"}:
            return 9  # decomposing and composing change the bytes by a factor of 3 each
        case {"type": "Sequence", "normalizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _shrinking(part)
            return factor
    return 0


def _dropping(spec: dict[str, Any]) -> int:
    """As `_shrinking`, for pre-tokenizers: 0 for those that drop characters."""
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
