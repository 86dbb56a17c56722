"""Text in process: the one file that uses the functions of preprocessing and postprocessing."""

from pathlib import Path

from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import state_after
from slipstream_postprocessing.detokenize import detokenize
from slipstream_preprocessing.encode import Encoder

from slipstream.bridge.pieces import Piece


class TextWriter:
    """The text of one sequence, response by response."""

    def __init__(self, encoder: Encoder, skip_special: bool = True) -> None:
        self._vocab = encoder.vocab
        self._skip_special = skip_special
        self._state = StreamState(number=1)

    def write(self, prompt: list[int], piece: Piece, is_last: bool) -> str:
        """What the tokens add to the text; `prompt` comes before them and may be empty."""
        token_ids = prompt + piece.token_ids
        state = self._state._replace(is_last=is_last, drop_bytes=piece.drop_bytes)
        text = detokenize(self._vocab, token_ids, state, self._skip_special)
        if not is_last:
            self._state = state_after(self._vocab, token_ids, state, self._skip_special)
        return text


def load_encoder(directory: Path, add_special_tokens: bool, max_model_len: int) -> Encoder:
    """The tokenizer of a checkpoint. Raises what `Encoder.load` does."""
    return Encoder.load(directory, add_special_tokens, max_model_len)
