"""Decoders of a `tokenizer.json`: map pieces of the vocabulary to bytes.

Accepted are the decoders of byte-level BPE, of SentencePiece models (Metaspace; Replace,
ByteFallback, Fuse, Strip) and of WordPiece. Any other, and any other order, is refused by name: its
text cannot be streamed token by token, or nobody has shown that it can.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec


class UnsupportedTokenizerError(ValueError):
    """A `tokenizer.json` that cannot be read, or whose decoder cannot be streamed."""


TextStep = Callable[[str, bool], str]  # (piece, is_first) -> piece


class Chain(NamedTuple):
    """A decoder for single pieces: text steps, then bytes; one cut at the start of the text."""

    steps: list[TextStep]
    to_bytes: Callable[[str], bytes]
    is_positional: bool  # a step treats the first token differently
    strip: bytes  # taken once from the front of the whole text

    def encode(self, piece: str, is_first: bool = False) -> bytes:
        """Return the bytes of a piece, as the text's first one if the steps distinguish it."""
        for step in self.steps:
            piece = step(piece, is_first)
        return self.to_bytes(piece)


def read_chain(decoder: object) -> Chain:
    """The accepted order: Replace, Metaspace, WordPiece; ByteLevel or ByteFallback; Fuse; Strip."""
    if decoder is None:
        return Chain(
            [lambda piece, is_first: piece if is_first else f" {piece}"], str.encode, True, b""
        )
    steps: list[TextStep] = []
    to_bytes: Callable[[str], bytes] | None = None
    is_positional, is_fused, strip = False, False, b""
    for spec in _flatten(decoder):
        match spec:
            case {"type": "Replace" | "Metaspace" | "WordPiece"} if to_bytes or is_fused:
                raise _refused(spec, "after bytes or Fuse")
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                steps.append(_replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                is_prepended = spec.get("prepend_scheme", "always") != "never"
                is_positional |= is_prepended
                steps.append(_metaspace(mark, is_prepended))
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
                is_positional = True
                steps.append(_word_piece(prefix, cleanup))
            case {"type": "ByteLevel" | "ByteFallback" as kind} if not to_bytes and not is_fused:
                to_bytes = _byte_level if kind == "ByteLevel" else _byte_fallback
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": str(char), "start": 0 | 1 as start, "stop": 0} if (
                is_fused and not strip
            ):
                strip = char.encode() * start
            case _:
                raise _refused(spec, "here")
    if strip and is_positional:
        raise _refused(decoder, "with both a cut and a first token of its own")
    return Chain(steps, to_bytes or str.encode, is_positional, strip)


def _flatten(decoder: object) -> list[dict[str, Any]]:
    match decoder:
        case {"type": "Sequence", "decoders": list(parts)}:
            return [spec for part in parts for spec in _flatten(part)]
        case {"type": str()}:
            return [cast(dict[str, Any], decoder)]
        case _:
            raise _refused(decoder, "without a type")


def _refused(spec: object, where: str) -> UnsupportedTokenizerError:
    kind = spec.get("type") if isinstance(spec, dict) else spec
    return UnsupportedTokenizerError(
        f"decoder {kind!r} {where} cannot be streamed ({msgspec.json.encode(spec).decode()[:200]})"
    )


def _replace(old: str, new: str) -> TextStep:
    return lambda piece, is_first: piece.replace(old, new)


def _metaspace(mark: str, is_prepended: bool) -> TextStep:
    def step(piece: str, is_first: bool) -> str:
        return piece.replace(mark, "" if is_first and is_prepended else " ")

    return step


# English contractions and punctuation, in the order of the `tokenizers` library.
_CLEANUP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
)


def _word_piece(prefix: str, cleanup: bool) -> TextStep:
    def step(piece: str, is_first: bool) -> str:
        if not is_first:
            joined = piece.removeprefix(prefix)
            piece = joined if joined != piece else f" {piece}"
        for old, new in _CLEANUP if cleanup else ():
            piece = piece.replace(old, new)
        return piece

    return step


def _byte_fallback(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            pass
    return piece.encode()


def _byte_level_table() -> dict[int, int]:
    """Return character -> byte of GPT-2's byte-level BPE; unused characters leave Latin-1.

    Printable bytes stand for themselves, the other 68 are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, 0xFFFF)
    table |= {0x100 + index: byte for index, byte in enumerate(others)}
    return table | {byte: byte for byte in printable}


_BYTE_LEVEL = _byte_level_table()
# Of each byte, the character that stands for it in such a vocabulary.
BYTE_CHARACTERS = {byte: chr(code) for code, byte in _BYTE_LEVEL.items() if byte != 0xFFFF}


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:  # an added token outside the alphabet stands for its own text
        return piece.encode()
