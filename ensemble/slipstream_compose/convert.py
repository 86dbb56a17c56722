"""Convert a SentencePiece model, tiktoken's ranks or GPT-2's two files to `tokenizer.json`."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.files import read_json

from slipstream_compose.compose import ComposeError
from slipstream_compose.tokenizer_classes import CLASSES, TokenizerClass, is_shifted

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
ICE = CLASSES["ChatGLM1Tokenizer"].file
FILES = sorted({"tokenizer.model", *(known.file for known in CLASSES.values())})
VOCABULARY, MERGES = "vocab.json", "merges.txt"  # of GPT-2's tokenizer, which OPT has alone
# Module -> requirement for pip. Newer sentencepiece needs a protobuf that tritonclient refuses.
_NEEDS = {"sentencepiece": "sentencepiece<=0.2.1", "google.protobuf": "protobuf"}
_TRANSFORMERS = {"transformers": "transformers>=5"}
# None starts with a space, which transformers treats in its own way.
_PROBES = ("def f(x):\n\treturn x", "two  spaces", "naïve café", "漢字 😀", "1234567 <a> \\")


def needs_conversion(checkpoint: Path) -> bool:
    """Return whether the checkpoint has a vocabulary of another form, but no `tokenizer.json`."""
    return _vocabulary(checkpoint) is not None and not (checkpoint / TOKENIZER).exists()


def convert_tokenizer(checkpoint: Path, tokens: Sequence[str] = ()) -> list[Path]:
    """Write `tokenizer.json` into the checkpoint; return what was written.

    A chat template is written, too, where the class of the tokenizer has one in its code. `tokens`
    are those of a template that was named: some classes have them in some models. Raises
    ComposeError if a package is missing, a file cannot be read, or the result does not encode texts
    as the original does.
    """
    source = _vocabulary(checkpoint)
    assert source is not None
    known = CLASSES.get(_class_of(checkpoint))
    if source.name == VOCABULARY:
        known = None
        _require(source, _TRANSFORMERS)
    elif known is None or known.pattern is None:
        _require(source, _NEEDS | ({} if known else _TRANSFORMERS))
    try:
        if known is None:
            tokenizer = _by_transformers(checkpoint, source)
        else:
            tokenizer = _by_class(checkpoint, source, known, tokens)
    except Exception as error:  # of many types, by the library that reads the file
        reason = str(error).strip().partition("\n")[0]
        if reason.endswith(":"):  # a list of what transformers tried
            reason = f"transformers reads no tokenizer from it, by {CONFIG} and config.json"
        raise ComposeError(f"{source} cannot be made a {TOKENIZER}: {reason}") from None
    tokenizer.save(str(checkpoint / TOKENIZER))
    template = _template(checkpoint, known, tokenizer) if known else None
    if template is None:
        return [checkpoint / TOKENIZER]
    (checkpoint / TEMPLATE).write_text(template, encoding="utf-8")
    return [checkpoint / TOKENIZER, checkpoint / TEMPLATE]


def _vocabulary(checkpoint: Path) -> Path | None:
    names = [*FILES, *([VOCABULARY] if (checkpoint / MERGES).is_file() else [])]
    found = [checkpoint / name for name in names if (checkpoint / name).is_file()]
    return next((each for each in found if each.name != ICE or not is_shifted(checkpoint)), None)


def _class_of(checkpoint: Path) -> str:
    """Return the name of the tokenizer's class; those of ChatGLM 1 to GLM-4 may have the same."""
    if (checkpoint / ICE).is_file():
        return "ChatGLM1Tokenizer"
    config = _config(checkpoint, CONFIG)
    name = str(config.get("tokenizer_class", ""))
    special = json.dumps(config.get("added_tokens_decoder", {}))
    return "ChatGLM4Tokenizer" if name == "ChatGLM4Tokenizer" or "<sop>" in special else name


def _config(checkpoint: Path, name: str) -> dict[str, object]:
    return read_json(checkpoint / name) if (checkpoint / name).is_file() else {}


def _require(source: Path, modules: dict[str, str]) -> None:
    missing = [package for module, package in modules.items() if not _is_here(module)]
    if missing:
        packages = " ".join(f"'{package}'" for package in missing)
        raise ComposeError(f"{source} is made a {TOKENIZER} after: pip install {packages}")


def _is_here(module: str) -> bool:
    """Return whether a module can be imported; that of a package that is missing cannot."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _by_transformers(checkpoint: Path, source: Path) -> Any:
    """Convert the tokenizer of a class that transformers has; it knows what that adds to a text."""
    from transformers import AutoTokenizer

    if source.name != VOCABULARY:
        _read_pieces(source)
    fast = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False).backend_tokenizer
    if source.name == VOCABULARY:
        _check_bytes(fast, source)
    else:
        _probe(fast, source)
    return fast


def _check_bytes(tokenizer: Any, source: Path) -> None:
    """Raise ValueError if tokens are not those of the file, or a text is not what they spell."""
    tokens = read_json(source)
    if not isinstance(tokens, dict) or not tokens:
        raise ValueError("it is no object of tokens and their ids")
    wrong = [token for token, i in tokens.items() if tokenizer.token_to_id(token) != i]
    if wrong:
        raise ValueError(f"{wrong[0]!r} gets another id")
    for text in _PROBES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids) != text:
            raise ValueError(f"{text!r} becomes other tokens")


def _by_class(checkpoint: Path, source: Path, known: TokenizerClass, tokens: Sequence[str]) -> Any:
    """Convert the tokenizer of a class whose code lies in the checkpoint, from known facts."""
    from slipstream_compose.ranks import read_ranks, tokenizer_of_ranks
    from slipstream_compose.sentence_pieces import read_pieces, tokenizer_of_pieces

    config = _config(checkpoint, CONFIG)
    if known.pattern is None:
        proto = read_pieces(source)
        _check_pieces(proto, known)
        tokenizer, bos = tokenizer_of_pieces(proto, known.spelled), proto.trainer_spec.bos_piece
        _probe(tokenizer, source, known.spelled)
    else:
        tokenizer = tokenizer_of_ranks(read_ranks(source), known.pattern, known.composes)
        bos = ""
    special = known.special
    first = known.special_if_named[:1]
    if first and (first[0] in json.dumps(config) or first[0] in tokens):
        special += known.special_if_named
    tokenizer.add_special_tokens(list(special))
    adds_bos = config.get("add_bos_token", known.adds_bos)
    prefix = [bos] if bos and adds_bos is True else list(known.prefix)
    _put_around(tokenizer, prefix, list(known.suffix), config)
    return tokenizer


def _check_pieces(proto: Any, known: TokenizerClass) -> None:
    """Raise ValueError if pieces that the class's code names are missing."""
    wanted = [piece for _, piece in known.spelled]
    wanted += known.special if known.spelled else []
    missing = set(wanted) - {piece.piece for piece in proto.pieces}
    if missing:
        raise ValueError(f"{min(missing)!r} is no piece of it")


def _put_around(
    tokenizer: Any, prefix: list[str], suffix: list[str], config: dict[str, object]
) -> None:
    """Let the tokenizer put tokens before every text, and behind it."""
    from tokenizers.processors import TemplateProcessing

    numbered = config.get("added_tokens_decoder")
    if isinstance(numbered, dict):  # in their order: each gets the next id
        for _, token in sorted((int(i), token) for i, token in numbered.items()):
            tokenizer.add_special_tokens([token["content"]] if token.get("special") else [])
    if not prefix and not suffix:
        return
    ids = [(token, tokenizer.token_to_id(token)) for token in (*prefix, *suffix)]
    missing = [token for token, token_id in ids if token_id is None]
    if missing:
        raise ValueError(f"{missing[0]!r}, which begins every text, is no token of it")
    single = [*prefix, "$A", *suffix]
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=ids
    )


def _read_pieces(source: Path) -> Any:
    """Read a SentencePiece model; raises ValueError for a file that is none."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(source))
    except (RuntimeError, OSError):
        raise ValueError("it is no SentencePiece model") from None


def _probe(tokenizer: Any, source: Path, spelled: Sequence[tuple[str, str]] = ()) -> None:
    """Raise ValueError if a text is encoded in other tokens than SentencePiece's."""
    original = _read_pieces(source)
    for text in _PROBES:
        ids, given = tokenizer.encode(text, add_special_tokens=False).ids, text
        for characters, piece in spelled:
            given = given.replace(characters, piece)
        if ids != original.encode(given):
            raise ValueError(f"{text!r} becomes other tokens")


def _template(checkpoint: Path, known: TokenizerClass, tokenizer: Any) -> str | None:
    """Return the chat template to write; None: there is one, or nothing says it is a chat model."""
    has_template = (checkpoint / TEMPLATE).exists() or _config(checkpoint, CONFIG).get(
        "chat_template"
    )
    generation = _config(checkpoint, "generation_config.json")
    is_chat = generation.get("chat_format") == "chatml" or any(
        key in generation for key in known.turns
    )
    if known.template is None or has_template or not is_chat:
        return None
    template = known.template
    for key in known.turns:
        token_id = generation.get(key)
        token = tokenizer.id_to_token(token_id) if type(token_id) is int else None
        if token is None:
            raise CheckpointError(
                f"{checkpoint}/generation_config.json: {key} = {token_id!r} is no token"
            )
        template = template.replace(key.removesuffix("_token_id").upper(), token)
    return template
