"""Executes a `Batch` on the device: stage inputs, run the model, sample. Knows no request."""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import Batch, Sampled
from slipstream.core.laps import Laps
from slipstream.core.step_sizes import StepSizes
from slipstream.kernels.cache.copy_blocks import copy_blocks
from slipstream.kernels.runtime import jit
from slipstream.kernels.staging.stage import start_step
from slipstream.layers.residual import Residual
from slipstream.models.decoder import build_any
from slipstream.runner import idle_tuning
from slipstream.runner.adapter_rows import NONE, Active, OfStep, adapters_of
from slipstream.runner.adapters import Adapters
from slipstream.runner.cache_dtype import log_scales
from slipstream.runner.devices import available_on_host, free_on_gpu
from slipstream.runner.draft_loading import load_drafter
from slipstream.runner.drafting import Drafting
from slipstream.runner.graphs import Buckets, Captured, Graphs, largest_shapes, layout_of
from slipstream.runner.group import ALONE, Group
from slipstream.runner.launched import LaunchedStep, StepEnds
from slipstream.runner.layer_inputs import LayerInputs
from slipstream.runner.load_weights import load_weights
from slipstream.runner.log_probs import Ask, Tops
from slipstream.runner.masks import MaskPlaces, StepMasks
from slipstream.runner.memory import left_in_share, left_on_gpu, num_blocks
from slipstream.runner.plan import Plan
from slipstream.runner.sampler import HistoryInputs, Results, count, make_counts, sample_tokens
from slipstream.runner.sampling_rows import HistoryArrays, histories
from slipstream.runner.slots import Slots
from slipstream.runner.staging import Staging
from slipstream.runner.step_arrays import StepArrays
from slipstream.runner.step_builder import StepBuilder
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.step_shape import StepShape
from slipstream.runner.transfers import host_memory
from slipstream.runner.two_way import TwoWayBuilder
from slipstream.runner.values import Beside, ask_values, has_prompts, largest_piece, wants_logits

_log = logging.getLogger(__name__)
_EDIT_BYTES = 1 << 20  # of a step with a graph


class ModelRunner:
    """The model, its paged cache, the buffers of a step and, on a GPU, the graphs of steps.

    Results of steps go to two halves of one buffer by turns: one is written while the other is
    read. The GPU takes the token of a row in flight from there, unseen by the host.
    """

    @torch.inference_mode()
    def __init__(self, plan: Plan, group: Group = ALONE) -> None:
        self._group = group
        if plan.num_threads is not None:
            torch.set_num_threads(plan.num_threads)
        laps = Laps()
        self.block_size = plan.block_size
        self.vocab_size = plan.model.dims.vocab_size
        self.max_model_len = plan.max_model_len
        self.max_in_flight = plan.max_in_flight
        self.window = window = plan.window
        self.attention_doubles_at = plan.attention_doubles_at
        self._device = plan.device
        self._dtype, self._is_sliced = plan.dtype, plan.config.deterministic
        self._hidden_size = plan.model.dims.hidden_size
        before = free_on_gpu(plan.device)
        self._places = [place for _, place in plan.groups.places]  # of each layer, in the cache
        num_positions = window.size if window.has_gaps else plan.max_model_len
        weights = load_weights(plan)
        self._model = build_any(plan.model, weights, num_positions)
        self._mapped_bytes = weights.mapped_bytes
        self._group.share(self._model, self.vocab_size)
        log_scales(plan.cache_dtype, self._model)
        laps.lap("weights")
        budget, num_rows = plan.max_num_batched_tokens, plan.max_drafted_rows
        buckets = Buckets(plan.max_num_seqs, budget, layout_of(plan), num_rows)
        self._make_buffers(plan, buckets)
        self.adapters = Adapters(plan, self._model, self._num_tokens, group)
        self._drafting = self._make_drafting(plan)
        self._graphs, self.step_sizes = None, StepSizes()
        left = left_in_share(plan, before, self._measure(plan, buckets, laps))
        self.num_blocks = self._group.agree(num_blocks(plan, self.adapters.reserve(left)))
        self._make_caches(plan, self.num_blocks)
        laps.lap("cache")
        self.transfers, self._host_bytes = host_memory(plan, self._group, self._in_blocks)
        laps.lap("host memory")
        has_graphs = plan.attention.has_graphs and plan.model.build is None  # classes have none yet
        if has_graphs and plan.config.cuda_graphs:
            self._graphs = Graphs(buckets, group.all_can, None, plan.config.tensor_parallel > 1)
            self.step_sizes = buckets.sizes
            self._graphs.capture(self.padding)
            laps.lap("graphs")
        laps.log(_log, "runner")

    def _measure(self, plan: Plan, buckets: Buckets, laps: Laps) -> int:
        """Bytes that are left for the cache. On a GPU all kernels are compiled then, and loaded."""
        if plan.device.type == "cpu":
            return max(0, available_on_host() - self._mapped_bytes) // plan.config.num_ranks
        self._make_caches(plan, 1)
        alone, mixed, *others = largest_shapes(plan, self._builder.layout)
        with jit.compile_ahead():
            for shape in [*buckets.shapes, alone]:
                self._run_padding(shape)
            self._run_largest(mixed)
            self._copy_blocks(Batch((), 0, copies=((0, 0),)))
        laps.lap("compiling")
        largest = max(buckets.shapes, key=lambda shape: shape.num_tokens)
        in_graphs = [lambda: self._run_padding(alone), lambda: self._run_padding(largest)]
        left = left_on_gpu(plan.device, lambda: self._run_largest(mixed, *others), in_graphs)
        laps.lap("largest step")
        return left

    def _run_largest(self, mixed: StepShape, *others: StepShape) -> list[object]:
        """Run what takes the most memory beside the cache; return what lives beside drafts."""
        for shape in others:
            self._run_padding(shape)
        return [self._run_padding(mixed), self._prepare_prompt()(), self._warm_drafts(mixed)]

    def _run_padding(self, shape: StepShape) -> Tensor:
        """Run a step of nothing but padding, and one with adapters if such are expected."""
        if self.adapters.by_tables and self.adapters.are_expected:
            self._prepare_adapted(shape, has_experts=True)()
        return self.padding(shape)()

    def _make_caches(self, plan: Plan, num_blocks: int) -> None:
        """Allocate a cache for each layer of a group, in one piece of memory."""
        self._cache = plan.kv.allocate(num_blocks, plan.device)
        self._caches = list(self._cache)
        self._in_blocks = [self._cache]  # all that blocks hold
        if self._drafting is not None:
            self._drafting.drafter.allocate(num_blocks)
            self._in_blocks += self._drafting.drafter.caches

    def _make_buffers(self, plan: Plan, buckets: Buckets) -> None:
        """Make the buffers of a step besides weights and cache, for the largest step."""
        device, layout = plan.device, layout_of(plan)
        num_rows = layout.up(max(plan.max_num_rows, buckets.max_rows))
        num_tokens = layout.up(max(plan.max_num_batched_tokens, buckets.max_tokens, num_rows))
        self._num_tokens, max_blocks = num_tokens, plan.table_blocks
        if plan.config.prompt_unpacking == "on":
            plan.attention.reserve(num_tokens + plan.max_model_len, max_blocks, device)
        self._layers = LayerInputs(plan, num_rows if layout.has_chunks else num_tokens)
        self._slots = slots = Slots(plan.max_num_seqs, max_blocks, self._layers.num_tables)
        builder = StepBuilder if plan.model.axes.two_way is None else TwoWayBuilder
        self._builder = builder(slots, plan.block_size, layout, plan.window.has_gaps)
        self._counts = make_counts(plan.max_num_seqs, self.vocab_size, device)
        self._half = num_rows
        self._first_result = 0  # of the next step
        self._num_places = num_places = max(2, plan.max_in_flight) * num_rows
        self._results = Results(num_places, device)
        self._masks = MaskPlaces(num_places, self.vocab_size, device)
        arrays = self._builder.padding(StepShape(num_tokens, num_rows, 0, num_rows, num_tokens))
        size = len(arrays.memory) + self._layers.num_bytes + _EDIT_BYTES
        self._staging = Staging(device, size)
        self._histories = Staging(device)
        self._copies = Staging(device, 1 << 16)
        self._tops = Tops(num_places, self.vocab_size, device)
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(plan.max_in_flight + 1)]  # type: ignore[no-untyped-call]
            self._step_ends = StepEnds(events)

    def _make_drafting(self, plan: Plan) -> Drafting | None:
        """Load the drafter on the device, if the plan has one."""
        draft = plan.drafts
        if draft is None:
            return None
        drafter = load_drafter(plan, draft, self._model, self._half, self._num_tokens)
        # Full attention has the first tables (core/groups.py).
        where = (plan.block_size, self._slots, 0, self._half)
        return Drafting(drafter, draft.num_drafts, *where, plan.device)

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launch a step; on a CPU it is computed when it is waited for."""
        first, before = self._next_places()
        masks, active = self._masks.start(batch, first), self.adapters.of(batch)
        size = sum([row.samples for row in batch.rows])
        given = batch, first, before, masks, active
        if self._device.type == "cpu":
            return LaunchedStep(lambda: self._read(first, size, *self._run(*given)), masks)
        made = self._run(*given)
        number = self._step_ends.record()
        return LaunchedStep(
            lambda: self._read(first, size, *made), masks, lambda: self._step_ends.wait(number)
        )

    def _next_places(self) -> tuple[int, int]:
        """Return the first places of a new step's results, and of the last step's."""
        half, first, size = self._half, self._first_result, self._num_places
        self._first_result = (first + half) % size
        return first, (first - half) % size

    def memory(self) -> tuple[int, int]:
        """Bytes that torch holds on the device, and of pinned memory on the host."""
        if self._device.type == "cpu":
            return 0, 0
        stagings = (self._staging, self._histories, self._copies, self._tops.staging)
        pinned = sum(staging.num_pinned_bytes for staging in stagings)
        if self._drafting is not None:
            pinned += self._drafting.num_pinned_bytes
        return torch.cuda.memory_reserved(self._device), pinned + self._host_bytes

    def run(self, batch: Batch) -> Sampled:
        """Run one step from beginning to end."""
        return self.launch(batch).wait()

    def _read(self, first: int, size: int, asks: list[Ask], beside: Beside | None) -> Sampled:
        """Return the results of a completed step, which begin at `first`."""
        samples = self._results.read(first, size)
        drafting, half = self._drafting, int(first > 0)
        drafts = ({}, 0) if drafting is None else (drafting.read(half), drafting.took_ns(half))
        tops = self._tops.read(asks, first) if asks else {}
        values = ({}, {}) if beside is None else beside.read()
        return Sampled(*samples, tops, *values, *drafts)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Unedited fp32 logits `[rows that sample, vocab]`; the cache is written as by `run`.

        Eagerly, in the shape in which `run` would compute it.
        """
        exact, active = self._builder.layout.shape_of(batch), self.adapters.of(batch)
        shape = self._graph_shape(exact, active) or exact
        arrays = self._builder.build(batch, shape, 0, 0)
        tokens = adapters_of(batch, shape) if active else NONE
        self._group.announce(batch, shape, arrays, tokens)
        with self.adapters.step(active, tokens, shape, arrays):
            return self._forward(shape, self._stage(arrays))[arrays.samples].float()

    # --- a step --------------------------------------------------------------------------------

    def _run(
        self, batch: Batch, first: int, before: int, masks: StepMasks | None, active: Active
    ) -> tuple[list[Ask], Beside | None]:
        """Put a step into the stream; results from `first` on, those of the last from `before`.

        With a graph nothing is done for which torch would have to be in inference mode: on a host
        that was idle that alone takes 0.05 ms.
        """
        if batch.copies:
            self._copy_blocks(batch)
        shape = self._builder.layout.shape_of(batch)
        beside = Beside() if has_prompts(batch) or wants_logits(batch) else None
        found = None if has_prompts(batch) else self._graph_shape(shape, active)
        shape = found or shape
        arrays = self._builder.build(batch, shape, first, before)
        tokens = adapters_of(batch, shape) if active else NONE
        self._group.announce(batch, shape, arrays, tokens, found is not None)
        captured = None if found is None else self._graph(shape, active)
        places = arrays.samples  # now: on a CPU the step itself marks rows that are late
        if masks is not None:
            masks.ask(arrays.rows, places)
        history = histories(batch.rows)
        if history is not None:
            self._count(history)
        base = self._staging.copy(arrays.memory)
        of_step = active, tokens, shape, arrays
        captured = self._placed(captured, base, of_step)
        if captured is not None:
            captured.graph.replay()
        self._staging.sent()
        logits = None if captured is None else captured.logits
        if logits is None:
            inputs, keeps_all = StepInputs.of(base, arrays), has_prompts(batch)
            with self.adapters.step(*of_step, keeps_all):
                if beside is not None and keeps_all:
                    logits = self._step_with_prompts(shape, inputs, batch, beside)
                else:
                    logits = self._step(shape, inputs)
        asks: list[Ask] = []
        if batch.may_have_tops:
            given = StepInputs.of(base, arrays).sampling, self._counts, self._results.token_ids
            asks = ask_values(self._tops, batch, logits, places, given, first, beside)
        if self._drafting is not None:
            inputs = StepInputs.of(base, arrays)
            rows = self._layers.rows(shape, inputs, 0)
            state = inputs, rows, self._counts, self._results.token_ids
            self._drafting.run(int(first > 0), batch, arrays, *state)
        return asks, beside

    def _graph_shape(self, shape: StepShape, active: Active) -> StepShape | None:
        """Return the shape of the graph for a step of a shape and some adapters, if it has one."""
        if self._graphs is None or not self.adapters.can_be_graph(active):
            return None
        return self._graphs.shape_of(shape, bool(active), self.adapters.have_experts(active))

    def _graph(self, shape: StepShape, active: Active) -> Captured | None:
        """Return the graph of a step that is announced, captured now if it is the first."""
        assert self.adapters.can_be_graph(active), "ranks have terms of the same places"
        given = (self._prepare_adapted, self.adapters.have_experts(active)) if active else ()
        return None if self._graphs is None else self._graphs.graph(shape, *given)

    def _placed(self, graph: Captured | None, base: Tensor, step: OfStep) -> Captured | None:
        """Return the graph of a step if what the step gives lies where the graph reads it."""
        if graph is None or not self._staging.is_home(base):
            return None
        if step[0] and not self.adapters.upload(*step, keeps_all=False).is_home:
            return None
        return graph

    @torch.inference_mode()
    def _count(self, history: HistoryArrays) -> None:
        """Count the tokens of these sequences anew, before the step samples more."""
        count(self._counts, HistoryInputs(*self._histories.upload(history)))

    @torch.inference_mode()
    def _copy_blocks(self, batch: Batch) -> None:
        """Copy the blocks that a batch names, in all layers."""
        (pairs,) = self._copies.upload([np.array(batch.copies, np.int32)])
        for cache in self._in_blocks:
            copy_blocks(pairs, cache)

    def padding(self, shape: StepShape) -> Callable[[], Tensor]:
        """Stage a step of nothing but padding; return what launches it; no other runs meanwhile."""
        inputs = self._stage(self._builder.padding(shape))
        return lambda: self._step(shape, inputs)

    def chores(self, plan: Plan) -> Iterator[float | None]:
        """Do what an idle engine does, a piece by a `next`: capture graphs of steps with adapters
        that are expected, and measure GEMMs (`idle_tuning.py`).
        """
        if plan.config.num_ranks == 1:  # else all ranks capture a graph at the same step
            yield from self.captured_ahead()
        prepares = self.padding, self._prepare_adapted
        yield from idle_tuning.chores(plan, self._model, self._graphs, *prepares)

    def captured_ahead(self) -> Iterator[None]:
        """Capture graphs of steps with adapters, if such are expected, each by a `next`, while
        there is memory beside what adapters may still take.
        """
        adapters = self.adapters
        if self._graphs is None or not (adapters.by_tables and adapters.are_expected):
            return
        for has_experts in adapters.kinds_of_steps:
            pieces = self._graphs.captured_ahead(self._prepare_adapted, has_experts)
            while (free := free_on_gpu(self._device)) >= adapters.num_free_bytes:
                if next(pieces, self) is self:
                    break
                yield
            else:
                _log.info("idle times: graphs wait for their steps: %d bytes are free", free)

    def _prepare_adapted(self, shape: StepShape, has_experts: bool) -> Callable[[], Tensor]:
        """Stage a step of padding whose rows may have adapters; return what launches it."""
        arrays = self._builder.padding(shape)
        inputs, tables = self._stage(arrays), self.adapters.prepare(shape, arrays, has_experts)

        def step() -> Tensor:
            with self.adapters.having(tables):
                return self._step(shape, inputs)

        return step

    def _warm_drafts(self, shape: StepShape) -> bool:
        """Run the drafter, if any, behind a step of nothing but padding; return whether it did."""
        if self._drafting is not None:
            inputs = self._stage(self._builder.padding(shape))
            self._drafting.warm(inputs, self._layers.rows(shape, inputs, 0), self._counts)
        return self._drafting is not None

    def _stage(self, arrays: StepArrays) -> StepInputs:
        """Copy the arrays to the device."""
        base = self._staging.copy(arrays.memory)
        self._staging.sent()
        return StepInputs.of(base, arrays)

    @torch.inference_mode()
    def _step(self, shape: StepShape, inputs: StepInputs) -> Tensor:
        """Run all kernels of a step; return the logits that it sampled from."""
        logits = self._forward(shape, inputs)
        if shape.num_samples:
            self._sample(logits, inputs)
        return logits

    def _sample(self, logits: Tensor, inputs: StepInputs) -> None:
        sample_tokens(logits, inputs.sampling, self._counts, self._results, self._masks.masks)

    @torch.inference_mode()
    def _step_with_prompts(
        self, shape: StepShape, inputs: StepInputs, batch: Batch, beside: Beside
    ) -> Tensor:
        """Run a step that keeps all tokens, and make values of prompts beside its samples."""
        hidden = self._hidden(shape, inputs, keeps_all=True).values
        # Before the samples: a drafter keeps what the head saw last.
        beside.make_prompts(
            batch, hidden, self._model.logits, self._dtype, self.vocab_size, self._is_sliced
        )
        return self._step_logits(hidden, inputs)

    def _step_logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """Make logits of the sampled ones of all states, and sample."""
        if not len(inputs.sample_rows):
            return hidden.new_empty((0, self.vocab_size))
        with self.adapters.sampling():
            logits = self._model.logits(Residual(hidden[inputs.sample_rows]))
        self._sample(logits, inputs)
        return logits

    def _prepare_prompt(self) -> Callable[[], object]:
        """Return what makes the values of the largest piece of a prompt."""
        batch, count = largest_piece(self.vocab_size, self._dtype.itemsize)
        size = count, self._hidden_size
        hidden = torch.zeros(size, dtype=self._dtype, device=self._device)
        given = self._model.logits, self._dtype, self.vocab_size, self._is_sliced
        return lambda: Beside().make_prompts(batch, hidden, *given)

    def _forward(self, shape: StepShape, inputs: StepInputs) -> Tensor:
        """Run the kernels up to the logits, `[num_samples, vocab]` in the model's dtype."""
        return self._model.logits(self._hidden(shape, inputs))

    def _hidden(self, shape: StepShape, inputs: StepInputs, keeps_all: bool = False) -> Residual:
        """Run the kernels up to the sum behind the last block, of all tokens or of the sampled."""
        x, tables = inputs, self._layers.tables(shape)
        results = self._results.token_ids
        start_step(x.header, x.words, x.token_ids, x.sources, results, tables)
        self._group.spread(x.token_ids)
        of_layers = self._layers.of(shape, inputs, self._caches[0])
        # Where decodes are all there is, all tokens are sampled, in order.
        if shape.num_decodes < shape.num_tokens and not keeps_all:
            of_layers[-1] = of_layers[-1].of_last_layer(x.sample_rows, x.sample_starts)
        caches = [self._caches[place] for place in self._places]
        return self._model.hidden(x.token_ids, of_layers, caches)
