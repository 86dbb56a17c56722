"""What a runner does with other ranks: nothing, or the same step everywhere.

Rank 0 runs engine and scheduler, and alone samples: masks of guides come to it while a step runs,
and counts, log probs and drafts are made of the logits that it gathers. The others get the step as
bytes, the very ones that rank 0 copies to its device, and run the same layers over them. So nothing
that the scheduler decides can differ: chunks, drafts, beams, tables, copies of blocks.
"""

from typing import Protocol

import msgspec
from slipstream_runtime.ranks import RankError, RankMemory
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.kernels.comm.ranks import Ranks
from slipstream.kvcache.host import Direction
from slipstream.layers.decoder import StepDecoder
from slipstream.models.sharding import share
from slipstream.runner.step_arrays import StepArrays, StepShape
from slipstream.runner.values import has_prompts, piece_rows, pieces_of


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """A step of rank 0, as other ranks run it."""

    shape: StepShape
    num_edits: int
    tables: tuple[int, int]  # rows and width
    memory: bytes  # of the arrays
    copies: tuple[tuple[int, int], ...]  # of blocks, before the step
    # First token and number of tokens of each piece of a prompt that the head runs over; None: the
    # last layer keeps sampled tokens alone.
    pieces: tuple[tuple[int, int], ...] | None
    ended: tuple[int, ...]  # of copies, by direction: what rank 0 has seen end before


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move", gc=False):
    """A copy of blocks to host memory, or back."""

    direction: str
    pairs: list[tuple[int, int]]
    ended: tuple[int, ...]  # see `Frame`


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop", gc=False):
    """The end of the engine."""


Message = Frame | Move | Stop
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Group(Protocol):
    """The other ranks of a runner."""

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        """Join the weights of a rank to those of the others."""

    def agree(self, count: int) -> int:
        """Return the number of blocks that all ranks have room for."""

    def announce(self, batch: Batch, shape: StepShape, arrays: StepArrays) -> None:
        """Have the other ranks run this step, too."""

    def spread(self, token_ids: Tensor) -> None:
        """Take the tokens of a step from rank 0, where those lie that the last one sampled."""


class _Alone:
    """No other rank."""

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        """Nothing is to be joined."""

    def agree(self, count: int) -> int:
        """Return the count."""
        return count

    def announce(self, batch: Batch, shape: StepShape, arrays: StepArrays) -> None:
        """No other rank is there."""

    def spread(self, token_ids: Tensor) -> None:
        """The tokens are there."""


ALONE: Group = _Alone()


class Joined:
    """The other ranks, by the memory that all share.

    Args:
        memory: of all ranks.
        ranks: sums and gathers.
        itemsize: bytes of a logit.
        has_sources: whether tokens of a step may be in flight when it is launched.
    """

    def __init__(self, memory: RankMemory, ranks: Ranks, itemsize: int, has_sources: bool) -> None:
        self.num_steps = 0  # announced
        self.ended = [0] * len(Direction)  # copies, by direction, that rank 0 has seen end
        self._memory, self._ranks = memory, ranks
        self._itemsize, self._has_sources = itemsize, has_sources
        self._vocab_size = 0

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        """Join the layers; see `models/sharding.py`."""
        self._vocab_size = vocab_size
        share(model, self._ranks, vocab_size)

    def agree(self, count: int) -> int:
        """Return the least count of all ranks."""
        return self._ranks.least(count)

    def announce(self, batch: Batch, shape: StepShape, arrays: StepArrays) -> None:
        """Send the step, from rank 0."""
        pieces = None
        if has_prompts(batch):
            found = pieces_of(batch, piece_rows(self._vocab_size, self._itemsize))
            pieces = tuple((piece.first, piece.end - piece.begin) for piece in found)
        num_edits, tables = len(arrays.edits), (len(arrays.tables), arrays.tables.shape[1])
        memory = arrays.memory.tobytes()
        ended = tuple(self.ended)
        self.send(Frame(shape, num_edits, tables, memory, batch.copies, pieces, ended))
        self.num_steps += 1

    def spread(self, token_ids: Tensor) -> None:
        """Take the tokens of rank 0, if any can be in flight."""
        if self._has_sources:
            self._ranks.spread(token_ids)

    def send(self, message: Message) -> None:
        """Send to all other ranks, from rank 0."""
        self._memory.send(_encoder.encode(message))

    def receive(self) -> Message:
        """Wait for the next message of rank 0."""
        return _decoder.decode(self._memory.receive())

    def start(self, limit_s: float) -> None:
        """Take note that all serve from here on, and how late a rank may be."""
        self._memory.limit_s = limit_s
        self._ranks.start(limit_s)

    def fail(self) -> None:
        """Have all ranks leave what they wait for."""
        self._memory.fail()

    def named(self, error: Exception) -> Exception:
        """Return the error of a rank, by the name of the rank that this one's GPU waited for."""
        late = self._ranks.late()
        return error if late is None else RankError(f"{late}: {type(error).__name__}: {error}")
