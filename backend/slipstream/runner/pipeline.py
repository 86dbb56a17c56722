"""Runners of the stages of a pipeline: as many steps in flight as stages, each on another one.

A step goes round: the first stage embeds tokens and runs its layers, each later one runs its own,
and the last one sends its states back to the first, which makes logits and samples. Rank 0 launches
a step by its first part alone, and does its last part when the engine waits for it: between the two
it launches others. So every stage runs the steps in one order, and rank 0 tells the other ranks of
the first stage when the last part of a step comes (`Finish`).
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import Batch, Sampled
from slipstream.kernels.comm.links import Links
from slipstream.layers.decoder import Decoder
from slipstream.layers.residual import Residual
from slipstream.layers.stages import Inlet
from slipstream.runner.adapter_rows import NONE, Active, adapters_of
from slipstream.runner.graphs import Buckets
from slipstream.runner.group import Finish, Frame, Joined, Message
from slipstream.runner.launched import LaunchedStep
from slipstream.runner.log_probs import Ask
from slipstream.runner.masks import StepMasks
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import Plan
from slipstream.runner.ranks import Follower, Leader
from slipstream.runner.sampling_rows import histories
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import Int64s, StepArrays
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.step_shape import StepShape
from slipstream.runner.values import Beside, ask_values, has_prompts, rows_of_piece, wants_logits


class _Started(NamedTuple):
    """A step whose first part is launched."""

    shape: StepShape
    arrays: StepArrays  # a copy, as the builder's change with the next step
    keeps_all: bool  # the last layer keeps all tokens, not only those that are sampled
    active: Active  # adapters of the step
    adapters: Int64s  # of each token; see `adapters_of`
    is_graph: bool  # of each stage whose kernels take its terms


class _Stage(ModelRunner):
    """The layers of a stage between two links."""

    def __init__(self, plan: Plan, group: Joined) -> None:
        assert group.links is not None
        self._links: Links = group.links
        self._is_first = plan.model.stage == 0
        self._is_last = plan.model.stage == plan.model.num_stages - 1
        self._ends = Staging(plan.device)
        self._has_peers = plan.config.tensor_parallel > 1  # ranks of the same stage
        super().__init__(plan, group)

    @property
    def _inlet(self) -> Inlet:
        assert isinstance(self._model, Decoder)
        assert isinstance(self._model.embedding, Inlet)
        return self._model.embedding

    def _make_buffers(self, plan: Plan, buckets: Buckets) -> None:
        super()._make_buffers(plan, buckets)
        self._states: Tensor | None = None  # where graphs find what they begin with
        if not self._is_first and plan.device.type == "cuda":
            shape = (self._num_tokens, self._hidden_size)
            self._states = torch.zeros(shape, dtype=self._dtype, device=plan.device)
            self._inlet.take(self._states)

    def _hidden(self, shape: StepShape, inputs: StepInputs, keeps_all: bool = False) -> Residual:
        """Run the stage's layers; only the last stage leaves tokens out that are not sampled."""
        return super()._hidden(shape, inputs, keeps_all or not self._is_last)

    def _step(self, shape: StepShape, inputs: StepInputs) -> Tensor:
        """Run all kernels of a stage, to be measured or captured; return its states.

        A graph has no head: the states to be sampled come from the last stage, later.
        """
        hidden = self._hidden(shape, inputs).values
        if self._is_first and self._graphs is None and shape.num_samples:
            self._sample(self._model.logits(Residual(hidden[inputs.sample_rows])), inputs)
        return hidden

    def _prepare_prompt(self) -> Callable[[], object]:
        return super()._prepare_prompt() if self._is_first else lambda: None

    @torch.inference_mode()
    def _compute(self, step: _Started) -> None:
        """Run the stage's layers over what the stage before sends, and send their states on."""
        shape, arrays = step.shape, step.arrays
        graph = None
        if step.is_graph and self.adapters.can_be_graph(step.active):
            graph = self._graph(shape, step.active)
        base = self._staging.copy(arrays.memory)
        of_step = step.active, step.adapters, shape, arrays
        graph = self._placed(graph, base, of_step)
        if not self._is_first:
            self._take(self._links.receive(shape.num_tokens, self._hidden_size, self._dtype))
        if graph is not None:
            graph.graph.replay()
            hidden = graph.logits
        else:
            with self.adapters.step(*of_step, step.keeps_all):
                hidden = self._hidden(shape, StepInputs.of(base, arrays), step.keeps_all).values
        self._staging.sent()
        self._links.send(hidden)

    def _take(self, states: Tensor) -> None:
        if self._states is None:
            self._inlet.take(states)
        else:
            self._states[: len(states)].copy_(states)

    def _returned(self, step: _Started) -> tuple[Tensor, StepInputs]:
        """Return the states of the last stage, `[n, hidden]`, and the step's inputs once more."""
        shape = step.shape
        is_whole = step.keeps_all or shape.num_decodes == shape.num_tokens
        num_rows = shape.num_tokens if is_whole else shape.num_samples
        hidden = self._links.receive(num_rows, self._hidden_size, self._dtype)
        base = self._ends.copy(step.arrays.memory)
        self._ends.sent()
        return hidden, StepInputs.of(base, step.arrays)

    def _own_arrays(self, shape: StepShape, arrays: StepArrays) -> StepArrays:
        """Return a copy of a step's arrays."""
        tables = (len(arrays.tables), arrays.tables.shape[1])
        own = StepArrays.of(shape, self._layers.num_tables, len(arrays.edits), tables)
        own.memory[:] = arrays.memory
        return own


class StageLeader(_Stage, Leader):
    """Rank 0: launches the first parts of steps, and makes the samples of those that come back."""

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launch the first part of a step; the rest is done when it is waited for."""
        first = self._next_places()[0]
        size = sum([row.samples for row in batch.rows])
        masks = self._masks.start(batch, first)
        started, places = self._start(batch, first, masks)
        return LaunchedStep(lambda: self._finish(batch, started, places, first, size), masks)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Return logits of a step that nothing is sampled of; see `ModelRunner`."""
        started, places = self._start(batch, 0, None)
        logits = self._logits(batch, started, None)[0]
        return logits[places].float()

    def _start(self, batch: Batch, first: int, masks: StepMasks | None) -> tuple[_Started, Int64s]:
        """Announce a step and run its first part; return it, and where its samples are."""
        if batch.copies:
            self._copy_blocks(batch)
        shape, keeps_all = self._builder.layout.shape_of(batch), has_prompts(batch)
        active = self.adapters.of(batch)
        found = None if keeps_all else self._graph_shape(shape, active)
        shape = found or shape
        arrays = self._builder.build(batch, shape, first, 0)
        places = arrays.samples
        with self.fatal_once_announced():
            of_tokens = adapters_of(batch, shape) if active else NONE
            self._group.announce(batch, shape, arrays, of_tokens, found is not None)
            if masks is not None:
                masks.ask(arrays.rows, places)
            own = self._own_arrays(shape, arrays)
            started = _Started(shape, own, keeps_all, active, of_tokens, found is not None)
            self._compute(started)
        return started, places

    def _finish(
        self, batch: Batch, started: _Started, places: Int64s, first: int, size: int
    ) -> Sampled:
        try:
            asks, beside = self._end(batch, started, places, first)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            raise self.fatal(error) from error
        return self._read(first, size, asks, beside)

    @torch.inference_mode()
    def _end(
        self, batch: Batch, started: _Started, places: Int64s, first: int
    ) -> tuple[list[Ask], Beside | None]:
        """Sample the states that have come round."""
        history = histories(batch.rows)
        if history is not None:
            self._count(history)
        beside = Beside() if started.keeps_all or wants_logits(batch) else None
        logits, inputs = self._logits(batch, started, beside)
        if len(logits):
            self._sample(logits, inputs)
        if not batch.may_have_tops:
            return [], beside
        given = inputs.sampling, self._counts, self._results.token_ids
        return ask_values(self._tops, batch, logits, places, given, first, beside), beside

    def _logits(
        self, batch: Batch, started: _Started, beside: Beside | None
    ) -> tuple[Tensor, StepInputs]:
        """Return the logits `[samples, vocab]` of a step, and its inputs; fill `beside`."""
        if self._has_peers:
            self._joined.send(Finish(tuple(self._joined.ended)))
        hidden, inputs = self._returned(started)
        if started.keeps_all and beside is not None:
            given = self._model.logits, self._dtype, self.vocab_size, self._is_sliced
            beside.make_prompts(batch, hidden, *given)
        if started.keeps_all:
            hidden = hidden[inputs.sample_rows]
        if not len(hidden):
            return hidden.new_empty((0, self.vocab_size)), inputs
        with self.adapters.end(started.active, started.adapters, started.arrays):
            return self._model.logits(Residual(hidden)), inputs


class StageFollower(_Stage, Follower):
    """Any other rank: runs the layers of its stage, and of the first one its part of the head."""

    def __init__(self, plan: Plan, group: Joined) -> None:
        self._started: deque[tuple[Frame, _Started]] = deque()
        super().__init__(plan, group)

    def _obey(self, message: Message) -> None:
        if not isinstance(message, Finish):
            super()._obey(message)
        elif self._is_first:
            self._end(*self._started.popleft())

    @torch.inference_mode()
    def _replay(self, frame: Frame) -> None:
        if frame.copies:
            self._copy_blocks(Batch((), 0, copies=frame.copies))
        tokens = np.frombuffer(frame.adapters, np.int64)
        has_pieces, active = frame.pieces is not None, self._active(tokens)
        of_step = has_pieces, active, tokens, frame.is_graph
        step = _Started(frame.shape, self._arrays(frame), *of_step)
        self._compute(step)
        if self._is_first:
            self._started.append((frame, step))

    @torch.inference_mode()
    def _end(self, frame: Frame, step: _Started) -> None:
        """Make this rank's part of the logits, in the order of rank 0."""
        hidden, inputs = self._returned(step)
        for first, count in frame.pieces or ():
            self._model.logits(rows_of_piece(hidden, first, count, self._is_sliced))
        if step.keeps_all:
            hidden = hidden[inputs.sample_rows]
        if not len(hidden):
            return
        with self.adapters.end(step.active, step.adapters, step.arrays):
            self._model.logits(Residual(hidden))
