"""What a runner does with other ranks: nothing, or the same step everywhere.

Rank 0 runs engine and scheduler, and alone samples: masks of guides come to it while a step runs,
and counts, log probs and drafts are made of the logits that it gathers. The others get the step as
bytes, the very ones that rank 0 copies to its device, and run the same layers over them. So nothing
that the scheduler decides can differ: chunks, drafts, beams, tables, copies of blocks.
"""

from collections.abc import Iterator
from enum import Enum

import msgspec
import torch
from slipstream_runtime.ranks import RankError, RankMemory
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.kernels.comm.links import Links
from slipstream.kernels.comm.ranks import Ranks
from slipstream.kvcache.host import Direction
from slipstream.layers.adapted import Term
from slipstream.layers.adapted_experts import divided
from slipstream.layers.decoder import StepDecoder
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.sharding import share
from slipstream.runner.step_arrays import Int64s, StepArrays
from slipstream.runner.step_shape import StepShape
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
    adapters: bytes = b""  # of each token, by `adapters_of`; none: no row has any
    is_graph: bool = False  # the shape is a graph's: all ranks that have that replay it


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move", gc=False):
    """A copy of blocks to host memory, or back."""

    direction: str
    pairs: list[tuple[int, int]]
    ended: tuple[int, ...]  # see `Frame`


class AdapterPart(msgspec.Struct, frozen=True, array_like=True, tag="adapter", gc=False):
    """A piece of what a rank keeps of an adapter in host memory."""

    number: int
    rank: int  # others skip its terms
    largest: int  # the largest rank of its terms
    of_inputs: list[str] | None  # see `AdapterWeights`; None: it has no magnitudes
    terms: msgspec.Raw  # `list[SentTerm]`
    has_more: bool  # pieces follow, for this rank or another
    ended: tuple[int, ...]  # see `Frame`


class SentTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor in a message."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    memory: bytes


class SentTerm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A term in a message: of `layers.adapted.Term`."""

    place: str
    first: int
    tensors: tuple[SentTensor | None, SentTensor | None, SentTensor | None]


class AdapterOrder(Enum):
    """What ranks do with an adapter that they have."""

    LOAD = "load"
    EVICT = "evict"
    REMOVE = "remove"


class AdapterDo(msgspec.Struct, frozen=True, array_like=True, tag="order", gc=False):
    """An order about an adapter."""

    order: AdapterOrder
    number: int
    ended: tuple[int, ...]  # see `Frame`


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish", gc=False):
    """The end of the oldest step of a pipeline: the first stage makes its logits."""

    ended: tuple[int, ...] = ()  # see `Frame`


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop", gc=False):
    """The end of the engine."""


Message = Frame | Move | AdapterPart | AdapterDo | Finish | Stop
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_terms: msgspec.msgpack.Decoder[list[SentTerm]] = msgspec.msgpack.Decoder(list[SentTerm])
_STEP_BYTES = 512 << 10  # of adapters, that are sent before a step
PartTerms = dict[str, list[Term]]  # by place


def _sent(place: str, term: Term) -> SentTerm:
    return SentTerm(place, term.first, (_packed(term.a), _packed(term.b), _packed(term.gain)))


def _packed(x: Tensor | None) -> SentTensor | None:
    if x is None:
        return None
    memory = x.contiguous().view(torch.uint8).numpy().tobytes()
    return SentTensor(str(x.dtype).removeprefix("torch."), tuple(x.shape), memory)


def _tensor(sent: SentTensor | None) -> Tensor | None:
    if sent is None:
        return None
    flat = torch.frombuffer(bytearray(sent.memory), dtype=torch.uint8)
    return flat.view(getattr(torch, sent.dtype)).view(sent.shape)


class Group:
    """The other ranks of a runner; here there is none."""

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        """Join the weights of a rank to those of the others."""

    def agree(self, count: int) -> int:
        """Return the number of blocks that all ranks have room for."""
        return count

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that share layers with this one."""
        return x

    def all_can(self, can: bool) -> bool:
        """Return whether all ranks that share layers with this one can, of which each asks."""
        return can

    def announce(
        self,
        batch: Batch,
        shape: StepShape,
        arrays: StepArrays,
        tokens: Int64s,
        is_graph: bool = False,
    ) -> None:
        """Have the other ranks run this step, too, as a graph or eagerly.

        `tokens`: the adapter of each token, by `adapters_of`; none: no row has any.
        """

    def spread(self, token_ids: Tensor) -> None:
        """Take the tokens of a step from rank 0, where those lie that the last one sampled."""

    def give_adapter(self, number: int, weights: AdapterWeights) -> None:
        """Start to have each other rank keep its part of an adapter, piece by piece."""

    def give_some(self) -> None:
        """Send pieces of adapters, as many as may delay a step."""

    def give_all(self, number: int) -> None:
        """Send all pieces of an adapter that are left."""

    def is_giving(self, number: int) -> bool:
        """Return whether pieces of an adapter are left."""
        return False

    def order(self, order: AdapterOrder, number: int) -> None:
        """Have the other ranks do with an adapter what rank 0 does."""


ALONE = Group()


class Joined(Group):
    """The other ranks, by the memory that all share.

    Args:
        memory: of all ranks.
        ranks: sums and gathers.
        itemsize: bytes of a logit.
        has_sources: whether tokens of a step may be in flight when it is launched.
        links: to the neighbours in a pipeline; None: there is one stage.
    """

    def __init__(
        self,
        memory: RankMemory,
        ranks: Ranks,
        itemsize: int,
        has_sources: bool,
        links: Links | None = None,
    ) -> None:
        self.links = links
        self.num_steps = 0  # announced
        self.ended = [0] * len(Direction)  # copies, by direction, that rank 0 has seen end
        self._memory, self._ranks = memory, ranks
        self._itemsize, self._has_sources = itemsize, has_sources
        self._vocab_size = 0
        self._giving: dict[int, Iterator[AdapterPart]] = {}  # by rank 0, in the order of numbers
        self._parts: dict[int, PartTerms] = {}  # of this rank, which has not got all of them
        self._held: list[tuple[AdapterOrder, int]] | None = None  # None: orders are sent at once

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        """Join the layers; see `models/sharding.py`."""
        self._vocab_size = vocab_size
        if self._ranks.size > 1:
            share(model, self._ranks, vocab_size)

    def agree(self, count: int) -> int:
        """Return the least count of all ranks."""
        return min(int(each) for each in self._memory.gather(str(count).encode()))

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of the stage."""
        return x if self._ranks.size == 1 else self._ranks.sum(x)

    def all_can(self, can: bool) -> bool:
        """Return whether all ranks of the stage can: on the host, none waits for a device."""
        return can if self._ranks.size == 1 else bool(self._ranks.least(int(can)))

    def announce(
        self,
        batch: Batch,
        shape: StepShape,
        arrays: StepArrays,
        tokens: Int64s,
        is_graph: bool = False,
    ) -> None:
        """Send the step, from rank 0, behind some of what adapters wait for."""
        self.give_some()
        pieces = None
        if has_prompts(batch):
            found = pieces_of(batch, piece_rows(self._vocab_size, self._itemsize))
            pieces = tuple((piece.first, piece.end - piece.begin) for piece in found)
        num_edits, tables = len(arrays.edits), (len(arrays.tables), arrays.tables.shape[1])
        memory = arrays.memory.tobytes()
        ended = tuple(self.ended)
        given = shape, num_edits, tables, memory, batch.copies, pieces, ended, tokens.tobytes()
        self.send(Frame(*given, is_graph))
        self.num_steps += 1

    def give_adapter(self, number: int, weights: AdapterWeights) -> None:
        """Start to send the parts of an adapter, from rank 0: some before each step.

        All ranks fold magnitudes together, so parts with these are sent at once.
        """
        self._giving[number] = self._pieces(number, weights)
        if weights.has_magnitudes:
            self.give_all(number)

    def _pieces(self, number: int, weights: AdapterWeights) -> Iterator[AdapterPart]:
        """Make the messages of an adapter, for each term of each rank, and one that ends them.

        All ranks keep their parts when the last has come: to fold magnitudes they wait for each
        other, and read no message meanwhile.
        """
        of_inputs = sorted(weights.of_inputs) if weights.has_magnitudes else None

        def piece(rank: int, terms: list[SentTerm], has_more: bool) -> AdapterPart:
            sent, ended = msgspec.Raw(_encoder.encode(terms)), tuple(self.ended)
            return AdapterPart(number, rank, weights.rank, of_inputs, sent, has_more, ended)

        for rank, terms in enumerate(weights.others, start=1):
            for place, found in terms.items():
                for term in (each for whole in found for each in divided(whole, _STEP_BYTES)):
                    yield piece(rank, [_sent(place, term)], True)
        yield piece(0, [], False)

    def give_some(self) -> None:
        """Send at most `_STEP_BYTES` of adapters, or one piece that is larger."""
        left = _STEP_BYTES
        while self._giving and left > 0:
            left -= self._give_piece()

    def give_all(self, number: int) -> None:
        """Send all pieces of an adapter that are left, behind those of adapters before it."""
        while number in self._giving:
            self._give_piece()

    def is_giving(self, number: int) -> bool:
        """Return whether pieces of an adapter are left."""
        return number in self._giving

    def _give_piece(self) -> int:
        """Send the next piece; return its bytes."""
        number, pieces = next(iter(self._giving.items()))
        piece = next(pieces, None)
        if piece is None:
            del self._giving[number]
            return 0
        self.send(piece)
        return memoryview(piece.terms).nbytes

    def order(self, order: AdapterOrder, number: int) -> None:
        """Send an order, from rank 0, unless orders are held; other ranks obey it."""
        if self._held is not None:
            self._held.append((order, number))
        elif self._memory.rank == 0:
            self.give_all(number)
            self.send(AdapterDo(order, number, tuple(self.ended)))

    def hold_orders(self) -> None:
        """Keep orders back: a step is launched that other ranks have not heard of."""
        self._held = self._held or []

    def send_orders(self) -> None:
        """Send the orders that were held, and later ones at once."""
        held, self._held = self._held or [], None
        for order, number in held:
            self.order(order, number)

    def part_of(self, message: AdapterPart) -> AdapterWeights | None:
        """Take a piece of an adapter; return this rank's part once it is whole, None before.

        Pieces for other ranks are skipped.
        """
        terms = self._parts.setdefault(message.number, {})
        if message.rank == self._memory.rank:
            for sent in _terms.decode(message.terms):
                a, b, gain = map(_tensor, sent.tensors)
                assert b is not None, "it always has that"
                terms.setdefault(sent.place, []).append(Term(sent.first, a, b, gain))
        if message.has_more:
            return None
        del self._parts[message.number]
        made = {place: tuple(found) for place, found in terms.items()}
        has = message.of_inputs is not None, frozenset(message.of_inputs or ())
        return AdapterWeights(made, b"", message.largest, (), *has)

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
        self._held = None
        self._memory.fail()

    def named(self, error: Exception) -> Exception:
        """Return the error of a rank, by the name of the rank that this one's GPU waited for."""
        late = self._ranks.late() or (None if self.links is None else self.links.error())
        return error if late is None else RankError(f"{late}: {type(error).__name__}: {error}")
