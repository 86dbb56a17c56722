"""Drafts on the device, right behind the samples of a step: nothing waits for the host between.

Rows that ask for drafts (`Row.num_drafts`) get a chain behind their sample. Several rows of a
sequence in a step verify drafts: the chain begins behind the first sample that is not the next
row's token, which the device finds. Each draft is sampled as the model would sample that output
number, by the same filters and random numbers (Daliri et al., 2024, arXiv 2408.07978), so a drafter
that agrees with the model says its tokens. Penalties and edits are left out: they change how often
a draft is right, never a token.
"""

from time import monotonic_ns
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import Batch, Row
from slipstream.kernels.sampling.sample import EDIT_WORDS, ROW, ROW_WORDS
from slipstream.layers.attention import StepRows
from slipstream.runner.drafters import Chains, Drafter
from slipstream.runner.sampler import Results, SamplingInputs, sample_tokens
from slipstream.runner.sampling_rows import NUMBER, RESULT
from slipstream.runner.slots import Slots
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import Int32s, Int64s, StepArrays
from slipstream.runner.step_inputs import StepInputs

# Fields of a `ROW` record that a draft does not take from its row.
_NEUTRAL = {
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "first_edit": 0,
    "end_edit": 0,
    "likeliest": 0,
    "mask_tag": 0,
}


def neutralize(rows: Tensor) -> None:
    """Change `ROW` records `[m, words] i32`: no edits, no penalties, the sample to place i."""
    assert ROW.fields is not None
    for name, value in _NEUTRAL.items():
        kind, offset = ROW.fields[name][:2]
        words = rows.view(torch.float32) if kind == np.float32 else rows
        words[:, offset // 4] = value
    rows[:, RESULT] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)


class _Group(NamedTuple):
    """The rows of a sequence that ask for drafts, one after another."""

    first: int  # number of the first of their samples
    rows: list[Row]


def groups_of(batch: Batch) -> list[_Group]:
    """Return the rows of a step that ask for drafts, by sequence."""
    groups: list[_Group] = []
    number = 0
    for row in batch.rows:
        if not row.samples:
            continue
        if row.num_drafts:
            is_next = bool(groups) and groups[-1].rows[-1].sequence_id == row.sequence_id
            if is_next:
                groups[-1].rows.append(row)
            else:
                groups.append(_Group(number, [row]))
        number += 1
    return groups


class _Asked(NamedTuple):
    """The drafts that a step in flight makes."""

    groups: list[_Group]
    capacities: list[int]  # tokens that the tables of each have room for


class _Clock:
    """Time on the device between two points of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self._is_cuda)]  # type: ignore[no-untyped-call]
        self._start_ns = self._took_ns = 0
        self._has_run = False

    def reset(self) -> None:
        """Start anew from nothing."""
        self._took_ns, self._has_run = 0, False

    def start(self) -> None:
        """Set the first point."""
        self._has_run = True
        if self._is_cuda:
            self._events[0].record()
        else:
            self._start_ns = monotonic_ns()

    def stop(self) -> None:
        """Set the second."""
        if self._is_cuda:
            self._events[1].record()
        else:
            self._took_ns = monotonic_ns() - self._start_ns

    def took_ns(self) -> int:
        """Return the time between; the device has passed both points."""
        if self._is_cuda and self._has_run:
            return int(1e6 * self._events[0].elapsed_time(self._events[1]))
        return self._took_ns


class Drafting:
    """The drafter of a runner, and its buffers.

    Args:
        drafter: what says the tokens.
        num_drafts: of the longest chain.
        block_size: tokens of a block.
        slots: the tables of running sequences.
        table: which of a sequence's tables has the drafter's blocks.
        max_groups: sequences of a step.
        device: of all tensors.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_drafts: int,
        block_size: int,
        slots: Slots,
        table: int,
        max_groups: int,
        device: torch.device,
    ) -> None:
        self.drafter, self.num_drafts = drafter, num_drafts
        self._block_size, self._slots, self._table = block_size, slots, table
        self._staging = Staging(device)
        self._samples = Results(max_groups, device)
        self._edits = torch.zeros((1, EDIT_WORDS), dtype=torch.int32, device=device)
        # Of each half: which row of a group a chain begins behind, then its drafts.
        shape = (2, 1 + num_drafts, max_groups)
        self._drafts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._mirror = self._drafts
        if device.type == "cuda":
            self._mirror = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._asked: list[_Asked | None] = [None, None]
        self._clocks = [_Clock(device), _Clock(device)]

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of pinned host memory."""
        pinned = self._staging.num_pinned_bytes if self._drafts.is_cuda else 0
        return pinned + (self._mirror.nbytes if self._drafts.is_cuda else 0)

    # --- a step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(
        self,
        half: int,
        batch: Batch,
        arrays: StepArrays,
        inputs: StepInputs,
        rows: StepRows,
        counts: Tensor,
        results: Tensor,
    ) -> None:
        """Put the drafts of a step into the stream, behind its samples.

        Args:
            half: of the results.
            batch: the step.
            arrays, inputs: of it, on both sides.
            rows: what attention sees of it.
            counts: the state of penalties, which is not read.
            results: tokens that were sampled.
        """
        groups = groups_of(batch)
        # A step of decodes that ask for nothing leaves the drafter behind: it costs nothing, and
        # what these sequences ask for later is drafted worse.
        clock = self._clocks[half]
        clock.reset()
        self._asked[half] = None
        if not groups and batch.num_decodes == len(batch.rows):
            return
        clock.start()
        self.drafter.follow(inputs.token_ids, rows)
        if groups:
            self._make(half, groups, arrays, inputs, counts, results)
        clock.stop()

    def _make(
        self,
        half: int,
        groups: list[_Group],
        arrays: StepArrays,
        inputs: StepInputs,
        counts: Tensor,
        results: Tensor,
    ) -> None:
        """Make the chains of these groups; see `run`."""
        capacities = [len(g.rows[0].tables[self._table]) * self._block_size for g in groups]
        self._asked[half] = _Asked(groups, capacities)
        places, tables = self._arrays(groups, capacities, arrays)
        chosen, chains, sampling = self._start_chains(
            inputs, results, *self._upload(places, tables)
        )
        self._draft(half, chosen, chains, sampling, counts, results, groups)

    def _arrays(
        self, groups: list[_Group], capacities: list[int], arrays: StepArrays
    ) -> tuple[Int64s, Int32s]:
        """Where the groups' rows begin among the logits, how many they are, what room they have;
        `[3, m]`. And their tables, `[m, blocks]`.
        """
        samples = arrays.samples
        places = np.array(
            [
                [samples[group.first] for group in groups],
                [len(group.rows) for group in groups],
                capacities,
            ],
            np.int64,
        )
        slots = [group.rows[0].slot * self._slots.num_tables + self._table for group in groups]
        width = max(1, max(capacities) // self._block_size)
        return places, self._slots.tables[slots, :width]

    def _upload(self, places: Int64s, tables: Int32s) -> list[Tensor]:
        return self._staging.upload([places, tables])

    def _start_chains(
        self, inputs: StepInputs, results: Tensor, places: Tensor, tables: Tensor
    ) -> tuple[Tensor, Chains, Tensor]:
        """Find where chains begin: which row of its group each is behind, and its `ROW` record."""
        first, sizes, capacities = places
        steps = torch.arange(self.num_drafts + 1, device=first.device)
        rows = first[:, None] + torch.minimum(steps, sizes[:, None] - 1)
        tokens = inputs.sample_rows[rows]
        sampled = results[inputs.rows[rows, RESULT].long()]
        is_right = sampled[:, :-1] == inputs.token_ids[tokens[:, 1:]]
        is_right &= steps[:-1] < sizes[:, None] - 1
        chosen = is_right.long().cumprod(1).sum(1)
        rows, tokens = (x.gather(1, chosen[:, None])[:, 0] for x in (rows, tokens))
        chains = Chains(rows, tokens, inputs.positions[tokens] + 1, tables, capacities)
        return chosen, chains, inputs.rows[rows]

    def _draft(
        self,
        half: int,
        chosen: Tensor,
        chains: Chains,
        sampling: Tensor,
        counts: Tensor,
        results: Tensor,
        groups: list[_Group],
    ) -> None:
        count, out = len(groups), self._drafts[half]
        token_ids = results[sampling[:, RESULT].long()]
        neutralize(sampling)
        out[0, :count] = chosen
        most = max(group.rows[0].num_drafts for group in groups)
        self.drafter.start(chains)
        for number in range(min(most, self.num_drafts)):
            sampling[:, NUMBER] += 1
            logits = self.drafter.logits(number, token_ids)
            sample_tokens(logits, SamplingInputs(sampling, self._edits), counts, self._samples)
            token_ids = self._samples.token_ids[:count].clone()
            out[1 + number, :count] = token_ids
        if out.is_cuda:
            self._mirror[half].copy_(out, non_blocking=True)

    @torch.inference_mode()
    def warm(self, inputs: StepInputs, rows: StepRows, counts: Tensor) -> None:
        """Run everything once, on a step and on chains of nothing but padding."""
        device, width = self._drafts.device, self._slots.tables.shape[1]
        self.drafter.follow(inputs.token_ids, rows)
        for count in sorted({1, self._drafts.shape[2]}):
            zeros = torch.zeros(count, dtype=torch.int64, device=device)
            tables = torch.zeros((count, width), dtype=torch.int32, device=device)
            self.drafter.start(Chains(zeros, zeros, zeros, tables, zeros))
            sampling = torch.zeros((count, ROW_WORDS), dtype=torch.int32, device=device)
            neutralize(sampling)
            sampling[:, RESULT] = -1
            logits = self.drafter.logits(0, zeros)
            sample_tokens(logits, SamplingInputs(sampling, self._edits), counts, self._samples)

    def took_ns(self, half: int) -> int:
        """Return what the drafter took of a step that is complete."""
        return self._clocks[half].took_ns()

    def read(self, half: int) -> dict[int, list[int]]:
        """Return the drafts of a step that is complete, by number of the sample before them."""
        asked, self._asked[half] = self._asked[half], None
        if asked is None:
            return {}
        drafts: dict[int, list[int]] = {}
        chosen, *columns = self._mirror[half].tolist()
        for i, (group, capacity) in enumerate(zip(*asked, strict=True)):
            row = group.rows[chosen[i]]
            count = min(row.num_drafts, self.num_drafts)
            if self.drafter.first_place is not None:
                place = row.start + len(row.token_ids) + self.drafter.first_place
                count = min(count, capacity - place)
            if count > 0:
                own = [column[i] for column in columns[:count]]
                drafts[group.first + chosen[i]] = own
        return drafts
