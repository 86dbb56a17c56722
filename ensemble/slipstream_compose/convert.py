"""Convert a SentencePiece model to `tokenizer.json`, the only format that is served."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream_compose.compose import ComposeError

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
# Module -> requirement for pip. Newer sentencepiece needs a protobuf that tritonclient refuses.
_NEEDS = {"transformers": "transformers>=5", "sentencepiece": "sentencepiece<=0.2.1"}
# None starts with a space, which transformers treats in its own way.
_PROBES = ("def f(x):\n\treturn x", "two  spaces", "naïve café", "漢字 😀", "1234567 <a> \\")


def needs_conversion(checkpoint: Path) -> bool:
    """Return whether the checkpoint has a SentencePiece model but no `tokenizer.json`."""
    return (checkpoint / SENTENCEPIECE).is_file() and not (checkpoint / TOKENIZER).exists()


def convert_tokenizer(checkpoint: Path) -> Path:
    """Write `tokenizer.json` into the checkpoint and return its path.

    Raises ComposeError if a package is missing, a file cannot be read, or the result does
    not encode texts as the SentencePiece model does.
    """
    missing = [package for module, package in _NEEDS.items() if find_spec(module) is None]
    if missing:
        packages = " ".join(f"'{package}'" for package in missing)
        raise ComposeError(
            f"{checkpoint} has only {SENTENCEPIECE}, of which compose makes {TOKENIZER} after: "
            f"pip install {packages}"
        )
    try:
        tokenizer = _converted(checkpoint)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ComposeError(
            f"{checkpoint / SENTENCEPIECE} cannot be made a {TOKENIZER}: {reason}"
        ) from None
    target = checkpoint / TOKENIZER
    tokenizer.save(str(target))
    return target


def _converted(checkpoint: Path) -> Any:
    """Convert the tokenizer. Raises ValueError if it encodes a text differently."""
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    original = SentencePieceProcessor(model_file=str(checkpoint / SENTENCEPIECE))
    fast = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False).backend_tokenizer
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False).ids != original.encode(text):
            raise ValueError(f"transformers encodes {text!r} in other tokens")
    return fast
