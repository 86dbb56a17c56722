"""Drafters on the device: each says the next tokens of some sequences, one behind the other.

In a step the drafter first follows: it takes in the tokens that the model has computed. Then it
makes chains: from each sequence's last sample it says a token, from that the next.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.kernels.attention.backend import AttentionBackend
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import AnyBlock, Decoder
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.medusa import MedusaHeads


class Chains(NamedTuple):
    """Where `m` chains begin: behind the sample of a row each."""

    rows: Tensor  # [m] i64: rows of logits
    tokens: Tensor  # [m] i64: tokens of the step, whose logits these are
    positions: Tensor  # [m] i64: of the samples
    tables: Tensor  # [m, blocks] i32
    capacities: Tensor  # [m] i64: tokens that the tables have room for

    def at(self, offset: int, block_size: int, num_positions: int) -> StepRows:
        """Return the step of one token a chain, at the place of the sample plus `offset`.

        Where a table has no room there is no row, and what comes out means nothing.
        """
        places = self.positions + offset
        has_room = (places >= 0) & (places < self.capacities.clamp(max=num_positions))
        places = torch.where(has_room, places, 0)
        blocks = self.tables.gather(1, (places // block_size)[:, None])[:, 0]
        slots = torch.where(has_room, blocks * block_size + places % block_size, -1)
        starts = torch.zeros(1, dtype=torch.int32, device=places.device)
        lengths = torch.where(has_room, places + 1, 0).to(torch.int32)
        return StepRows(places, slots, self.tables, starts, lengths, len(places), 0)


class Drafter(Protocol):
    """A drafter on the device."""

    caches: list[Tensor]  # `[part, block, ...]` each: what it keeps in the blocks of the cache
    first_place: int | None  # where the first draft writes, from the sample's place; None: nowhere

    def allocate(self, num_blocks: int) -> None:
        """Make `caches` for so many blocks."""

    def follow(self, token_ids: Tensor, rows: StepRows) -> None:
        """Take in the tokens of a step, behind the model's own pass."""

    def start(self, chains: Chains) -> None:
        """Start these chains."""

    def logits(self, number: int, token_ids: Tensor) -> Tensor:
        """Logits `[m, vocab]` of draft `number`, which follows `token_ids [m] i64`."""


class Taps:
    """Copies of the model's states, in one place for steps of any shape, graphs included."""

    def __init__(
        self, rows: int, width: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._width = width
        self.states = torch.zeros((rows, count * width), dtype=dtype, device=device)

    def take(self, number: int, values: Tensor) -> None:
        """Keep `values [n, width]` as part `number` of the first rows."""
        begin = number * self._width
        self.states[: len(values), begin : begin + self._width].copy_(values)


class _TappedBlock:
    """A block whose input is kept."""

    def __init__(self, block: AnyBlock, taps: Taps, number: int) -> None:
        self.input_norm, self.attention = block.input_norm, block.attention
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp
        self._block, self._taps, self._number = block, taps, number

    def __call__(self, residual: Residual, inputs: AttentionInputs, cache: Tensor) -> None:
        self._taps.take(self._number, residual.values)
        self._block(residual, inputs, cache)


class _TappedHead:
    """A head whose input is kept, behind the norm."""

    def __init__(self, decoder: Decoder, taps: Taps) -> None:
        self._head, self._taps = decoder.head, taps
        self.table, self.product = decoder.head.table, decoder.head.product

    def __call__(self, norm: RowNorm, residual: Residual) -> Tensor:
        if len(residual) <= len(self._taps.states):  # else these are pieces of a prompt
            self._taps.take(0, norm(residual.values))
        return self._head(norm, residual)


def tap_blocks(decoder: Decoder, layers: Sequence[int], taps: Taps) -> None:
    """Keep the inputs of these blocks, as parts 0, 1, ..."""
    blocks: list[AnyBlock] = list(decoder.blocks)
    for number, layer in enumerate(layers):
        blocks[layer] = _TappedBlock(blocks[layer], taps, number)  # type: ignore[call-overload]
    decoder.blocks = blocks


def tap_head(decoder: Decoder, taps: Taps) -> None:
    """Keep the input of the head, as part 0."""
    decoder.head = _TappedHead(decoder, taps)  # type: ignore[assignment]


class MedusaDrafter:
    """Heads on the model's last state: no cache, and no draft depends on the one before it."""

    first_place: int | None = None

    def __init__(self, heads: MedusaHeads, taps: Taps) -> None:
        self.caches: list[Tensor] = []
        self._heads, self._taps = heads, taps
        self._states = taps.states

    def allocate(self, num_blocks: int) -> None:
        """Nothing is cached."""

    def follow(self, token_ids: Tensor, rows: StepRows) -> None:
        """The model's states are there already."""

    def start(self, chains: Chains) -> None:
        """Take the states of the rows."""
        self._states = self._taps.states[chains.rows]

    def logits(self, number: int, token_ids: Tensor) -> Tensor:
        """Return the logits of head `number`."""
        return self._heads.logits(number, self._states)


class ModelDrafter:
    """A smaller model of the same tokens; its keys and values lie in the blocks of the target's.

    Args:
        decoder: the model.
        windows: of its layers.
        backend: of its attention.
        vocab_size: of the target; logits are cut, or filled up with -inf.
        num_positions: of the longest sequence.
        device: of all tensors.
    """

    first_place: int | None = 0

    def __init__(
        self,
        decoder: Decoder,
        windows: Sequence[int],
        backend: AttentionBackend,
        vocab_size: int,
        num_positions: int,
        device: torch.device,
    ) -> None:
        self.caches: list[Tensor] = []
        self._decoder, self._windows, self._backend = decoder, windows, backend
        self._vocab_size, self._num_positions, self._device = vocab_size, num_positions, device
        self._chains: Chains | None = None

    def allocate(self, num_blocks: int) -> None:
        """Make the cache of its layers."""
        self.caches = [self._backend.kv_spec.allocate(num_blocks, self._device)]

    def _inputs(self, rows: StepRows) -> list[AttentionInputs]:
        made = {
            window: AttentionInputs.of(self._backend, self.caches[0][0], rows, window)
            for window in sorted(set(self._windows))
        }
        return [made[window] for window in self._windows]

    def follow(self, token_ids: Tensor, rows: StepRows) -> None:
        """Compute keys and values of the tokens."""
        self._decoder.hidden(token_ids, self._inputs(rows), list(self.caches[0]))

    def start(self, chains: Chains) -> None:
        """Keep the chains."""
        self._chains = chains

    def logits(self, number: int, token_ids: Tensor) -> Tensor:
        """Compute the last token of each chain, and return what it says of the next."""
        assert self._chains is not None
        block_size = self._backend.spec.block_size
        rows = self._chains.at(number, block_size, self._num_positions)
        logits = self._decoder(token_ids, self._inputs(rows), list(self.caches[0]))
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size].contiguous() if missing < 0 else logits


class Eagle3Drafter:
    """An EAGLE-3 layer. Its place p is of the model's state at p and of the token at p + 1.

    States are cached in the blocks, too: the first token of a step needs that of the token before
    it, which may have come with a step long ago, or with another sequence's prefix. What lies at
    the last place of a shared block depends on the token behind it: sequences that go on
    differently overwrite it, which may change a draft of theirs and never a token.
    """

    first_place: int | None = -1

    def __init__(
        self, head: Eagle3, backend: AttentionBackend, taps: Taps, num_positions: int
    ) -> None:
        self.caches: list[Tensor] = []
        self._head, self._backend, self._taps = head, backend, taps
        self._num_positions = num_positions
        self._chains: Chains | None = None
        self._states = taps.states

    def allocate(self, num_blocks: int) -> None:
        """Make the cache of the layer, and that of states."""
        size, width = self._backend.spec.block_size, self._head.embedding.shape[1]
        states = self._taps.states
        # One more row takes what belongs nowhere.
        self._rows = torch.zeros(
            (num_blocks * size + 1, width), dtype=states.dtype, device=states.device
        )
        layer = self._backend.kv_spec.allocate(num_blocks, states.device)
        self.caches = [layer, self._rows[:-1].view(1, num_blocks, size, width)]

    def _inputs(self, rows: StepRows) -> AttentionInputs:
        return AttentionInputs.of(self._backend, self.caches[0][0], rows, 0)

    def _slots_before(self, rows: StepRows) -> Tensor:
        """Return the slots of the places before the tokens of a step; -1: there is none."""
        n, count, size = rows.num_decodes, len(rows.positions), self._backend.spec.block_size
        owners = torch.arange(count, device=rows.slots.device)
        if count > n:
            chunked = torch.searchsorted(
                rows.query_starts, (owners[n:] - n).to(torch.int32), right=True
            )
            owners = torch.cat((owners[:n], n + chunked - 1))
        places = (rows.positions - 1).clamp(min=0)
        owners = owners.clamp(max=len(rows.block_tables) - 1)
        slots = rows.block_tables[owners, places // size] * size + places % size
        return torch.where((rows.slots >= 0) & (rows.positions > 0), slots, -1)

    def follow(self, token_ids: Tensor, rows: StepRows) -> None:
        """Cache the model's states, then keys and values of the places before the tokens."""
        states = self._head.fuse_states(self._taps.states[: len(token_ids)])
        self._rows[rows.slots] = states  # -1: the row that belongs nowhere
        slots = self._slots_before(rows)
        lengths = (rows.lengths - 1).clamp(min=0)
        positions = (rows.positions - 1).clamp(min=0)
        before = rows._replace(positions=positions, slots=slots, lengths=lengths)
        self._head(token_ids, self._rows[slots], self._inputs(before), self.caches[0][0])

    def start(self, chains: Chains) -> None:
        """Take the states of the rows' tokens."""
        self._chains = chains
        self._states = self._head.fuse_states(self._taps.states[chains.tokens])

    def logits(self, number: int, token_ids: Tensor) -> Tensor:
        """Go one place on, with its own state behind the first."""
        assert self._chains is not None
        block_size = self._backend.spec.block_size
        rows = self._chains.at(number - 1, block_size, self._num_positions)
        self._states = self._head(token_ids, self._states, self._inputs(rows), self.caches[0][0])
        return self._head.logits(self._states)
