"""Contents of `tokenizer_config.json` beside `tokenizer.json`: tokens, and roles of tokens.

The rules are those of transformers 5. Tokens of `added_tokens_decoder` come first, by their ids;
then those with a role (`bos_token`, `eos_token`, ..., and a model's own, such as `image_token`,
which may also stand in `model_specific_special_tokens`); then those of `extra_special_tokens`,
which older files call `additional_special_tokens`. A token that neither the vocabulary nor
`tokenizer.json` has gets the next free id.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.errors import clip

ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Roles that every tokenizer can have, in the order in which their tokens are added."""

_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_NAMED = "model_specific_special_tokens"
_NUMBERED = "added_tokens_decoder"


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text before the tokenizer's model sees it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: unless it is special
    special: bool = False

    def resolve(self, is_special: bool) -> "AddedToken":
        """Return the token with no flag left open."""
        normalized = not is_special if self.normalized is None else self.normalized
        return msgspec.structs.replace(self, special=is_special, normalized=normalized)


class TokenizerConfig(msgspec.Struct, frozen=True):
    """Configuration of one checkpoint's tokenizer.

    Attributes:
        roles: name of the role -> its token, in the order in which they are added.
        extra: special tokens without a role.
        numbered: id -> a token with a known id.
        gives_way: `tokenizer.json` wins where it has another token of the same id.
        splits_special: special tokens in a text are encoded like other text.
        chat_template: as it is written; None if there is none.
    """

    roles: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    numbered: Mapping[int, AddedToken]
    gives_way: bool
    splits_special: bool
    chat_template: Any

    @classmethod
    def load(cls, directory: Path) -> "TokenizerConfig":
        """Read `tokenizer_config.json`, completed from files that older checkpoints have beside it.

        `special_tokens_map.json` and `added_tokens.json` count only where the configuration has no
        `added_tokens_decoder`. A file that is missing is empty. Raises UnsupportedTokenizerError.
        """
        path = directory / "tokenizer_config.json"
        given = _read_object(path)
        own = {name: given.pop(name) for name in list(given) if _is_own(name, given[name], str)}
        _rename_extra(given, not given.get(_EXTRA))
        own |= _pop_named(given)
        own = own or _pop_specific(path, given)
        is_old = _NUMBERED not in given
        if is_old:
            _merge(given, _read_object(directory / "special_tokens_map.json"))
            own |= _pop_named(given)
            given[_NUMBERED] = _number_old(given, _read_object(directory / "added_tokens.json"))
        _rename_extra(given, _EXTRA not in given)
        own = {name: given[name] for name in given if _is_own(name, given[name], str | dict)} | own
        roles = {role: given[role] for role in ROLES if given.get(role) is not None} | own
        extra, numbered = given.get(_EXTRA) or [], given.get(_NUMBERED) or {}
        for name, value, kind in ((_EXTRA, extra, list), (_NUMBERED, numbered, dict)):
            if not isinstance(value, kind):
                raise UnsupportedTokenizerError(f"{path}: {name} is {clip(value)}, not tokens")
        return cls(
            {name: _token(path, name, value) for name, value in roles.items()},
            tuple(_token(path, f"{_EXTRA}[{i}]", value) for i, value in enumerate(extra)),
            {
                _id(path, i): _token(path, f"{_NUMBERED}[{i}]", value, is_special=False)
                for i, value in numbered.items()
            },
            is_old,
            bool(given.get("split_special_tokens", False)),
            given.get("chat_template"),
        )

    def text(self, role: str) -> str | None:
        """Return the token with a role, such as `eos_token`."""
        token = self.roles.get(role)
        return None if token is None else token.content

    def additions(self, present: Mapping[int, AddedToken]) -> list[AddedToken]:
        """Return the tokens to add to those of `tokenizer.json`, by id, in the order of adding.

        A token that is there with other flags is among them: it gets the flags that it has here.
        """
        numbered = {**self.numbered, **present} if self.gives_way else self.numbered
        found = [token for _, token in sorted(numbered.items())]
        contents = {token.content for token in (*present.values(), *found)}
        others: dict[AddedToken, AddedToken] = {}
        for token in (*self.roles.values(), *self.extra):
            if token.content not in contents:
                others.setdefault(token.resolve(token.special), token)
        found += others.values()
        named = {token.content for token in self.roles.values()}
        known = set(present.values())
        resolved = (token.resolve(token.special or token.content in named) for token in found)
        return [token for token in resolved if token.content and token not in known]


def number(
    vocabulary: Mapping[str, int], present: Mapping[int, AddedToken], added: Iterable[AddedToken]
) -> dict[int, AddedToken]:
    """Give the added tokens their ids: known ones, or the next that are free.

    Returns id -> token, those that were present among them. A token that was special stays so.
    """
    numbered = dict(present)
    ids = {token.content: token_id for token_id, token in present.items()}
    free = max(len(vocabulary), max(present, default=-1) + 1)
    for token in added:
        token_id = ids.get(token.content, vocabulary.get(token.content))
        if token_id is None:
            token_id, free = free, free + 1
        ids[token.content] = token_id
        was_special = token_id in numbered and numbered[token_id].special
        numbered[token_id] = msgspec.structs.replace(token, special=token.special or was_special)
    return numbered


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise UnsupportedTokenizerError(f"{path}: {error}") from None


def _is_own(name: str, value: object, kind: Any) -> bool:
    """Return whether the entry gives a token a role that is this model's own."""
    return name.endswith("_token") and name not in ROLES and isinstance(value, kind)


def _rename_extra(given: dict[str, Any], is_free: bool) -> None:
    """Take the tokens under the older name, if there are none under the newer."""
    if _OLD_EXTRA in given and is_free:
        given[_EXTRA] = given.pop(_OLD_EXTRA)


def _pop_named(given: dict[str, Any]) -> dict[str, Any]:
    """Take out extra tokens that are an object of names and tokens: each has a role."""
    return given.pop(_EXTRA) if isinstance(given.get(_EXTRA), dict) else {}


def _pop_specific(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Take out a model's own roles under their own key: it counts where no other key names one."""
    value = given.pop(_NAMED, None) or {}
    if not isinstance(value, dict):
        raise UnsupportedTokenizerError(f"{path}: {_NAMED} is {clip(value)}, not an object")
    return value


def _merge(given: dict[str, Any], older: Mapping[str, Any]) -> None:
    """Put what `special_tokens_map.json` says into the configuration."""
    for name, value in older.items():
        if name == _EXTRA and isinstance(value, list):
            listed = given.get(_EXTRA) or []
            given[_EXTRA] = [*listed, *(token for token in value if token not in listed)]
        elif isinstance(value, dict) and name != _EXTRA:
            given[name] = value | {"special": True}
        else:
            given[name] = value


def _number_old(given: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Read `added_tokens.json`, text -> id: a token that the configuration names is special."""
    values = [*(given.get(role) for role in ROLES), *(given.get(_EXTRA) or [])]
    named = {_content(value) for value in values}
    return {
        str(token_id): {
            "content": text,
            "special": text in named,
            "normalized": text not in named,
        }
        for text, token_id in ids.items()
    }


def _content(value: object) -> str | None:
    """Return a token's text; None for an object of `save_pretrained`, which has its own flags."""
    if isinstance(value, dict) and "__type" in value:
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id(path: Path, text: str) -> int:
    if text.isdecimal() and len(text) <= 10:
        return int(text)
    raise UnsupportedTokenizerError(f"{path}: {_NUMBERED}[{clip(text)}] is no token id")


def _token(path: Path, name: str, value: object, is_special: bool = True) -> AddedToken:
    """Read a token, a text or an object, which may leave out whether it is special."""
    if isinstance(value, str):
        value = {"content": value}
    if isinstance(value, dict) and "__type" not in value:
        value = {"special": is_special} | value
    try:
        return msgspec.convert(value, AddedToken)
    except msgspec.ValidationError as error:
        message = f"{path}: {name} is {clip(value)}, neither a text nor a token: {error}"
        raise UnsupportedTokenizerError(message) from None
