"""Runners of several ranks: rank 0 leads, the others follow; and the start of both.

A step that fails behind its announcement leaves ranks at different places: that is fatal, as a
broken device is, and the supervisor starts all of them again. So are failures of graphs, which are
captured there: each has sums over ranks, so all capture it at the same step, and have the same.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from slipstream_runtime.ranks import RankError

from slipstream.core.batch import Batch, Sampled
from slipstream.kvcache.host import Direction, Mover
from slipstream.runner.adapter_rows import Active
from slipstream.runner.draft_loading import tap
from slipstream.runner.group import (
    AdapterDo,
    AdapterOrder,
    AdapterPart,
    Frame,
    Joined,
    Message,
    Move,
    Stop,
)
from slipstream.runner.launched import LaunchedStep
from slipstream.runner.log_probs import Ask
from slipstream.runner.masks import StepMasks
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import Plan
from slipstream.runner.step_arrays import Int64s, StepArrays
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.values import Beside, rows_of_piece

_log = logging.getLogger(__name__)
_DIRECTIONS = list(Direction)


class Leader(ModelRunner):
    """Rank 0: announces each step, and gathers its logits."""

    def __init__(self, plan: Plan, group: Joined) -> None:
        self._joined = group
        super().__init__(plan, group)
        if self.transfers is not None:
            self.transfers = _EveryMover(self.transfers, group)

    def stop(self) -> None:
        """Have the others end, and launch nothing any more."""
        self._joined.send(Stop())

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launch a step; see `ModelRunner`.

        On a CPU it is announced when it is waited for, and what is done with adapters until then
        comes behind it: they may be those of the step.
        """
        launched = super().launch(batch)
        if self._device.type == "cpu":
            self._joined.hold_orders()
        return launched

    def _run(
        self, batch: Batch, first: int, before: int, masks: StepMasks | None, active: Active
    ) -> tuple[list[Ask], Beside | None]:
        try:
            with self.fatal_once_announced():
                return super()._run(batch, first, before, masks, active)
        finally:
            self._joined.send_orders()

    @contextmanager
    def fatal_once_announced(self) -> Iterator[None]:
        """Have all ranks end if what runs here fails once a step is announced."""
        announced = self._joined.num_steps
        try:
            yield
        except Exception as error:
            if self._joined.num_steps == announced:
                raise  # no other rank has heard of it
            raise self.fatal(error) from error

    def fatal(self, error: Exception) -> RankError:
        """Have all ranks end; return the error that this one ends with."""
        self._joined.fail()
        named = self._joined.named(error)
        return RankError(f"rank 0: {type(named).__name__}: {named}")

    def _read(self, first: int, size: int, asks: list[Ask], beside: Beside | None) -> Sampled:
        try:
            return super()._read(first, size, asks, beside)
        except Exception as error:
            raise self._joined.named(error) from error


class _EveryMover:
    """A mover of rank 0 whose copies all ranks make, each of its own heads.

    A copy has ended when rank 0's has: what rank 0 announces later says so, and the others wait for
    theirs before they do it. A copy's source is complete on all ranks when it is on rank 0: each
    had written it before the last sum of that step, of which rank 0 has all parts.
    """

    def __init__(self, mover: Mover, group: Joined) -> None:
        self._mover, self._group = mover, group
        self.num_slots, self.max_pairs = mover.num_slots, mover.max_pairs
        self.block_bytes = mover.block_bytes

    def start(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy on all ranks; see `Mover`."""
        self._group.send(Move(direction.value, list(pairs), tuple(self._group.ended)))
        self._mover.start(direction, pairs)

    def num_ended(self, direction: Direction) -> int:
        """Return how many copies have ended."""
        count = self._group.ended[_DIRECTIONS.index(direction)] = self._mover.num_ended(direction)
        return count

    def wait(self) -> None:
        """Wait for the oldest copies."""
        self._mover.wait()

    def rate(self, direction: Direction) -> float | None:
        """Bytes a second of one rank."""
        return self._mover.rate(direction)


class Follower(ModelRunner):
    """Any other rank: runs what rank 0 announces, and samples nothing."""

    def __init__(self, plan: Plan, group: Joined) -> None:
        self._joined = group
        super().__init__(plan, group)

    def _make_drafting(self, plan: Plan) -> None:
        """Leave drafts to rank 0; keep the states that its drafter reads, as it does."""
        if plan.drafts is not None:
            tap(plan, plan.drafts, self._model, self._half, self._num_tokens)

    def follow(self) -> None:
        """Run steps until rank 0 says that it ends. Raises `RankError` if a rank has failed."""
        while not isinstance(message := self._joined.receive(), Stop):
            try:
                self._catch_up(message.ended)
                self._obey(message)
            except Exception as error:
                self._joined.fail()
                raise self._joined.named(error) from error

    def _obey(self, message: Message) -> None:
        if isinstance(message, Frame):
            self._replay(message)
        elif isinstance(message, Move):
            self._move(message)
        elif isinstance(message, AdapterDo):
            self._do(message.order, message.number)
        elif isinstance(message, AdapterPart) and (weights := self._joined.part_of(message)):
            self.adapters.keep(message.number, weights)

    def _do(self, order: AdapterOrder, number: int) -> None:
        """Do with an adapter what rank 0 does; what is on its way has to arrive first."""
        if order is AdapterOrder.LOAD:
            self.adapters.start_load(number)
            return
        self.adapters.settle(number)
        if order is AdapterOrder.EVICT:
            self.adapters.evict(number)
        else:
            self.adapters.remove(number)

    def _active(self, tokens: Int64s) -> Active:
        """Return the adapters of a step's tokens, all of which are on the device then."""
        numbers = np.unique(tokens).tolist()
        for number in numbers:
            self.adapters.settle(number)
        return self.adapters.named(numbers)

    def _arrays(self, frame: Frame) -> StepArrays:
        arrays = StepArrays.of(frame.shape, self._layers.num_tables, frame.num_edits, frame.tables)
        arrays.memory[:] = np.frombuffer(frame.memory, np.uint8)
        return arrays

    def _catch_up(self, ended: Sequence[int]) -> None:
        """Wait until the copies have ended that rank 0 has seen end."""
        if self.transfers is None:
            return
        for direction, count in zip(_DIRECTIONS, ended, strict=True):
            while self.transfers.num_ended(direction) < count:
                self.transfers.wait()

    def _move(self, move: Move) -> None:
        assert self.transfers is not None, "all ranks have host memory, or none"
        self.transfers.start(Direction(move.direction), move.pairs)

    @torch.inference_mode()
    def _replay(self, frame: Frame) -> None:
        if frame.copies:
            self._copy_blocks(Batch((), 0, copies=frame.copies))
        shape = frame.shape
        arrays = self._arrays(frame)
        tokens = np.frombuffer(frame.adapters, np.int64)
        active = self._active(tokens)
        graph = self._graph(shape, active) if frame.is_graph else None
        base = self._staging.copy(arrays.memory)
        graph = self._placed(graph, base, (active, tokens, shape, arrays))
        if graph is not None:
            graph.graph.replay()
            self._staging.sent()
            return
        self._staging.sent()
        inputs = StepInputs.of(base, arrays)
        keeps_all = frame.pieces is not None
        with self.adapters.step(active, tokens, shape, arrays, keeps_all):
            self._run_layers(frame, inputs)

    def _run_layers(self, frame: Frame, inputs: StepInputs) -> None:
        shape = frame.shape
        if frame.pieces is None:
            self._step(shape, inputs)
            return
        hidden = self._hidden(shape, inputs, keeps_all=True).values
        for first, count in frame.pieces:
            self._model.logits(rows_of_piece(hidden, first, count, self._is_sliced))
        self._step_logits(hidden, inputs)

    def _sample(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        """Leave it to rank 0."""
