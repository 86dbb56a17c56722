"""A SentencePiece model to `tokenizer.json`, which is what everything here reads."""

from pathlib import Path

from slipstream_compose.compose import ComposeError

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"


def needs_conversion(checkpoint: Path) -> bool:
    """Whether there is a SentencePiece model and nothing else."""
    return (checkpoint / SENTENCEPIECE).is_file() and not (checkpoint / TOKENIZER).exists()


def convert_tokenizer(checkpoint: Path) -> Path:
    """Write `tokenizer.json` into the checkpoint; its path.

    Raises ComposeError if transformers is not installed, cannot read it, or nothing can be written.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ComposeError(
            f"{checkpoint} has only {SENTENCEPIECE}, of which compose makes {TOKENIZER} after: "
            "pip install 'slipstream[convert]' sentencepiece"
        ) from None
    target = checkpoint / TOKENIZER
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ComposeError(
            f"{checkpoint / SENTENCEPIECE} cannot be made a {TOKENIZER}: {reason} (it may need: "
            "pip install sentencepiece)"
        ) from None
    return target
