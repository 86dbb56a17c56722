"""Make a tokenizer of a SentencePiece model: BPE or Unigram, as its own encoder splits texts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.models.gguf.merges import merges_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _DEFINED = 3, 4  # ModelProto.SentencePiece.Type
_MARK = "\u2581"  # SentencePiece's space


def read_pieces(path: Path) -> Any:
    """Read a `ModelProto`. Raises ValueError if the file is none."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"no SentencePiece model: {error}") from None
    if not proto.pieces:
        raise ValueError("a SentencePiece model without pieces")
    return proto


def tokenizer_of_pieces(proto: Any, spelled: Sequence[tuple[str, str]]) -> Tokenizer:
    """Return the tokenizer, which adds nothing to a text. Raises ValueError for other kinds.

    `spelled` are characters and the pieces that stand for them, which texts may have, too.
    """
    if (
        proto.trainer_spec.treat_whitespace_as_suffix
        or not proto.normalizer_spec.escape_whitespaces
    ):
        raise ValueError("spaces behind words, or spaces that are no pieces, are not served")
    tokenizer = Tokenizer(_model(proto, keeps_pieces=bool(spelled)))
    has_prefix = proto.normalizer_spec.add_dummy_prefix
    written = [normalizers.Replace(*each) for each in spelled]
    tokenizer.normalizer = normalizers.Sequence([*written, *_normalizers(proto.normalizer_spec)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    bytes_of = [decoders.ByteFallback()] if proto.trainer_spec.byte_fallback else []
    read = [decoders.Replace(piece, characters) for characters, piece in spelled]
    parts = [*read, decoders.Replace(_MARK, " "), *bytes_of, decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    defined = [piece.piece for piece in proto.pieces if piece.type == _DEFINED]
    if spelled and defined:  # apart within a text, as it is then: an added token would begin a text
        longest = sorted(defined, key=len, reverse=True)
        pattern = Regex("|".join(re.escape(piece) for piece in longest))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    for piece in proto.pieces:
        if piece.type == _CONTROL or (piece.type == _DEFINED and not spelled):
            is_special = piece.type == _CONTROL
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False, special=is_special)])
    return tokenizer


def _model(proto: Any, keeps_pieces: bool) -> BPE | Unigram:
    """Return the model; `keeps_pieces`: a text that is a piece stays one, whatever merges there."""
    spec, pieces = proto.trainer_spec, [(piece.piece, piece.score) for piece in proto.pieces]
    if spec.model_type == _UNIGRAM:
        return Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    if spec.model_type != _BPE:
        raise ValueError("neither Unigram nor BPE")
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    return BPE(
        vocabulary,
        merges_of(vocabulary, [score for _, score in pieces]),
        unk_token=spec.unk_piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
        ignore_merges=keeps_pieces,
    )


def _normalizers(spec: Any) -> list[Any]:
    """Return what SentencePiece does with a text before it splits it."""
    found: list[Any] = []
    if spec.precompiled_charsmap:
        found.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        edges, runs = Regex(r"\A +| +\z"), Regex(" {2,}")
        found += [normalizers.Replace(edges, ""), normalizers.Replace(runs, " ")]
    prefix = [normalizers.Prepend(_MARK)] if spec.add_dummy_prefix else []
    return [*found, *prefix, normalizers.Replace(" ", _MARK)]
