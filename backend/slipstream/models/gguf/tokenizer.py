"""Make tokenizer.json, its configuration and chat templates of a GGUF file's metadata. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.gguf.file import GgufFile
from slipstream.models.gguf.merges import merges_of
from slipstream.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from slipstream.models.reader import Reader

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_BPE, _SPM = "gpt2", "llama"
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _UNUSED, _BYTE = range(1, 7)
_MARK = "\u2581"  # SentencePiece's space
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# Tokens of a chat that end an answer, whether or not the metadata names them, as for llama.cpp.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class GgufTokenizer:
    """The tokenizer of a file; all that is wrong with it raises `CheckpointError`."""

    def __init__(self, file: GgufFile) -> None:
        self._where = str(file.path)
        self._reader = Reader(file.metadata, self._where)
        self._model = self._reader.get(_MODEL)
        if self._model not in (_BPE, _SPM):
            raise self._reader.refusal(_MODEL, f"is not served; {_BPE} and {_SPM} are")
        self._tokens = self._texts("tokenizer.ggml.tokens")
        self._types = self._token_types()
        if len(set(self._tokens)) < len(self._tokens):
            raise CheckpointError(f"{self._where}: tokenizer.ggml.tokens has a token twice")
        pre = self._reader.get(_PRE)
        self._pre = PRE_TOKENIZERS.get(str(pre)) if self._model == _BPE else PreTokenizer()
        if self._pre is None:
            known = ", ".join(PRE_TOKENIZERS)
            raise self._reader.refusal(_PRE, f"is not served; one of {known} is")

    @property
    def num_tokens(self) -> int:
        """Ids that the tokenizer has."""
        return len(self._tokens)

    def files(self) -> dict[Path, str]:
        """Return name -> contents of the files, as in a Hugging Face checkpoint."""
        found = {
            Path("tokenizer.json"): json.dumps(self._tokenizer(), ensure_ascii=False),
            Path("tokenizer_config.json"): json.dumps(self._config(), indent=2) + "\n",
        }
        template = self._reader.get(_TEMPLATE)
        if template is not None:
            found[Path("chat_template.jinja")] = self._text(_TEMPLATE)
        names = self._texts(_TEMPLATES) if self._reader.has(_TEMPLATES) else []
        for name in names:
            if not name.replace("_", "").isalnum() or not name.isascii():
                raise self._reader.refusal(_TEMPLATES, f"has a name of another kind: {clip(name)}")
            text = self._text(f"{_TEMPLATE}.{name}")
            found[Path("additional_chat_templates", f"{name}.jinja")] = text
        return found

    def end_ids(self) -> list[int]:
        """Return the ids that end an answer: those that are named, then those that chats have."""
        named = (self._id(f"{role}_token_id") for role in ("eos", "eot", "eom"))
        found = [token_id for token_id in named if token_id is not None]
        ids = {text: i for i, text in enumerate(self._tokens) if self._types[i] == _CONTROL}
        return list(dict.fromkeys([*found, *(ids[text] for text in _ENDS if text in ids)]))

    def special_ids(self) -> dict[str, int]:
        """Return `bos_token_id` and the like, of those that the file names."""
        found = {f"{ours}_token_id": self._id(f"{name}_token_id") for name, ours in _ROLES.items()}
        return {name: token_id for name, token_id in found.items() if token_id is not None}

    def _config(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        roles = {
            name.removesuffix("_id"): self._tokens[token_id]
            for name, token_id in self.special_ids().items()
        }
        return roles | {"clean_up_tokenization_spaces": False}

    def _tokenizer(self) -> dict[str, Any]:
        """Return tokenizer.json."""
        assert self._pre is not None
        spec = self._byte_level(self._pre) if self._model == _BPE else self._sentence_pieces()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token_id,
                    "content": self._tokens[token_id],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != _DEFINED,
                }
                for token_id, kind in enumerate(self._types)
                if kind in (_UNKNOWN, _CONTROL, _DEFINED) and self._tokens[token_id]
            ],
            "post_processor": self._post_processor(),
        } | spec

    def _byte_level(self, pre: PreTokenizer) -> dict[str, Any]:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            "normalizer": {"type": "NFC"} if pre.is_nfc else None,
            "pre_tokenizer": pre.spec(),
            "decoder": level | {"use_regex": True},
            "model": {
                "type": "BPE",
                "ignore_merges": pre.ignores_merges,
                "vocab": self._vocabulary(),
                "merges": self._merges(),
            },
        }

    def _sentence_pieces(self) -> dict[str, Any]:
        """Return SentencePiece's model as BPE with bytes for what has no token."""
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
        restore = {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}
        has_prefix = self._reader.flag("tokenizer.ggml.add_space_prefix", default=True)
        prefix = [{"type": "Prepend", "prepend": _MARK}] if has_prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        decoders = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        unknown = self._id("unknown_token_id")
        vocabulary = self._vocabulary()
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges_of(vocabulary, self._scores()),
            },
        }

    def _vocabulary(self) -> dict[str, int]:
        """Return the tokens that have a text; those that only pad the list have none."""
        pairs = zip(self._tokens, self._types, strict=True)
        return {text: i for i, (text, kind) in enumerate(pairs) if kind != _UNUSED}

    def _merges(self) -> list[list[str]]:
        """Return the pairs of `tokenizer.ggml.merges`, in their order."""
        key = "tokenizer.ggml.merges"
        known, merges = set(self._tokens), []
        for text in self._texts(key):
            pair = text.split(" ")
            if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
                raise CheckpointError(f"{self._where}: {key}: {clip(text)} is no two tokens")
            merges.append(pair)
        return merges

    def _scores(self) -> Sequence[float]:
        key = "tokenizer.ggml.scores"
        scores = self._reader.get(key)
        if not isinstance(scores, list) or len(scores) != len(self._tokens):
            raise CheckpointError(f"{self._where}: {key} is no score for each of its tokens")
        if not all(isinstance(score, float) for score in scores):
            raise CheckpointError(f"{self._where}: {key} holds others than floats")
        return scores

    def _post_processor(self) -> dict[str, Any] | None:
        """Return what puts BOS before and EOS behind a text; None: nothing does."""
        assert self._pre is not None
        by_default = self._pre.adds_bos or self._model == _SPM
        start = self._edge("bos", by_default)
        stop = self._edge("eos", False)
        if not start and not stop:
            return None
        special = {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for text, token_id in {**start, **stop}.items()
        }

        def template(*parts: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            for number, part in enumerate(parts):
                found += [{"SpecialToken": {"id": text, "type_id": number}} for text in start]
                found.append({"Sequence": {"id": part, "type_id": number}})
                found += [{"SpecialToken": {"id": text, "type_id": number}} for text in stop]
            return found

        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": special,
        }

    def _edge(self, role: str, by_default: bool) -> dict[str, int]:
        """Return the token that is added at an edge of a text, and its id; empty: none."""
        key = f"tokenizer.ggml.add_{role}_token"
        token_id = self._id(f"{role}_token_id")
        if not self._reader.flag(key, default=by_default):
            return {}
        if token_id is None:
            if self._reader.has(key):
                raise self._reader.refusal(key, f"but {role}_token_id is missing")
            return {}
        return {self._tokens[token_id]: token_id}

    def _id(self, name: str) -> int | None:
        """Return a token's id that the metadata names; None: it does not."""
        key = f"tokenizer.ggml.{name}"
        value = self._reader.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self._tokens):
            raise self._reader.refusal(key, f"is none of {len(self._tokens)} tokens")
        return value

    def _token_types(self) -> Sequence[int]:
        key = "tokenizer.ggml.token_type"
        types = self._reader.get(key)
        if types is None:
            return [_NORMAL] * len(self._tokens)
        if not isinstance(types, list) or len(types) != len(self._tokens):
            raise CheckpointError(f"{self._where}: {key} is no type for each of its tokens")
        for kind in types:
            if type(kind) is not int or not _NORMAL <= kind <= _BYTE:
                raise CheckpointError(f"{self._where}: {key} holds {clip(kind)}, not 1 to {_BYTE}")
        return types

    def _texts(self, key: str) -> list[str]:
        value = self._reader.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{self._where}: {key} is no list of texts")
        return value

    def _text(self, key: str) -> str:
        value = self._reader.get(key)
        if not isinstance(value, str):
            raise self._reader.refusal(key, "is no text")
        return value


def has_tokenizer(metadata: Mapping[str, object]) -> bool:
    """Return whether a file has a tokenizer at all."""
    return metadata.get(_MODEL) not in (None, "none", "no_vocab")
