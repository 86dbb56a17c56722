"""Set up a checkpoint's tokenizer for guides, beside what else a start does."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

from slipstream_preprocessing.tokenizer import load_tokenizer, read_end_ids

from slipstream.guide.interface import GuideCompiler, GuideError, MakeCompiler
from slipstream.guide.llguidance import Compiler


def start_set_up(checkpoint: Path, vocab_size: int, raw: Callable[[int], bytes]) -> MakeCompiler:
    """Start to set up the compiler in a thread; what is returned waits for it.

    Args:
        checkpoint: the directory, with a `tokenizer.json`.
        vocab_size: number of the model's logits.
        raw: bytes of a token as the engine matches and sends them.
    """
    made: list[GuideCompiler | Exception] = []

    def set_up() -> None:
        try:
            text = (checkpoint / "tokenizer.json").read_text()
            end_ids = read_end_ids(checkpoint, load_tokenizer(checkpoint))
            made.append(Compiler(text, vocab_size, end_ids, raw))
        except Exception as error:  # raised where it is waited for
            made.append(error)

    thread = Thread(target=set_up, name="guide-tokenizer", daemon=True)
    thread.start()

    def wait() -> GuideCompiler:
        thread.join()
        (result,) = made
        if isinstance(result, GuideError):
            raise GuideError(f"guided output is off for this checkpoint: {result}")
        if isinstance(result, Exception):
            raise result
        return result

    return wait
