"""The results of a request: the chunks of a stream, or a whole completion."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A response: the new text and tokens of one sequence.

    `num_output_tokens` counts this chunk alone. `finish_reason` is set by `vllm_model` only, on a
    sequence's last chunk: the other models' contract has no tensor for it. `outputs` holds every
    tensor of the response as received, without the batch dimension.
    """

    text: str
    sequence_index: int = 0
    token_ids: tuple[int, ...] = ()
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """The sequences of a request, in the order of their index; tuples have one item for each.

    `chunks` holds the chunks of each sequence, with log probs and all other outputs.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    num_input_tokens: int | None
    num_output_tokens: tuple[int | None, ...]
    finish_reasons: tuple[str | None, ...]
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the first sequence, if the model reports one."""
        return self.finish_reasons[0]


def join(chunks: Iterable[Chunk]) -> Completion:
    """Join the chunks of a request into its completion."""
    sequences: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        sequences.setdefault(chunk.sequence_index, []).append(chunk)
    if not sequences:
        sequences[0] = [Chunk("")]  # a cancelled request may end without any response
    ordered = [sequences[index] for index in sorted(sequences)]
    inputs = [c.num_input_tokens for parts in ordered for c in parts if c.num_input_tokens]
    return Completion(
        texts=tuple("".join(chunk.text for chunk in parts) for parts in ordered),
        token_ids=tuple(tuple(i for c in parts for i in c.token_ids) for parts in ordered),
        num_input_tokens=inputs[0] if inputs else None,
        num_output_tokens=tuple(_total(parts) for parts in ordered),
        finish_reasons=tuple(parts[-1].finish_reason for parts in ordered),
        chunks=tuple(tuple(parts) for parts in ordered),
    )


def _total(parts: list[Chunk]) -> int | None:
    counts = [chunk.num_output_tokens for chunk in parts if chunk.num_output_tokens is not None]
    return sum(counts) if counts else None
