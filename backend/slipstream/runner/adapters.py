"""Adapters in host memory and on the device, by number, and the rows of a step that have each.

The device has a bounded pool of pages for them. Which of them are there is not decided here
(`engine/adapter_room.py`): they are copied by a thread, on a GPU on a stream of its own, while
steps go on, and evicted.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable

from slipstream.core.batch import Batch
from slipstream.errors import CheckpointError, ConfigError
from slipstream.fuse.adapt import AdaptedPlace, adapt
from slipstream.kernels.lora.terms import Table
from slipstream.layers.adapted import Group as RowGroup
from slipstream.layers.adapted import StepGroups, Terms
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.layers.magnitudes import Kind
from slipstream.models.adapters.legacy import read_table, read_task
from slipstream.models.adapters.read import AdapterWeights, PlaceTerms, bytes_of, read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.runner.adapter_forms import Loaded, ReadAdapter, has_kernels
from slipstream.runner.adapter_loads import Loads
from slipstream.runner.adapter_magnitudes import Fold
from slipstream.runner.adapter_pages import LEAST_PAGE
from slipstream.runner.adapter_places import REFUSAL, of_all_stages
from slipstream.runner.adapter_rows import Active
from slipstream.runner.adapter_tables import WIDEST, AdapterTables, TileLayout, Uploaded
from slipstream.runner.group import ALONE, AdapterOrder, Group
from slipstream.runner.memory import default_pool
from slipstream.runner.plan import Plan
from slipstream.runner.step_arrays import Int64s, StepArrays
from slipstream.runner.step_shape import StepShape

_log = logging.getLogger(__name__)
_MOST_FILLED = 2  # times its bytes that an adapter takes in host memory, whose ranks are filled up


class Adapters:
    """The adapters that steps may use. `read` may run in any thread, all else in the runner's.

    A number is used once. A launched step keeps the tensors that it uses, so an adapter can be
    evicted at any time.

    `are_expected`: whether options of the start name some, or memory for them.
    `by_tables`: whether kernels add the terms of adapters that they take, on a GPU in 16 bits, on a
    CPU in fp32; torch adds those of others, one after another.
    """

    def __init__(
        self, plan: Plan, model: StepDecoder, max_tokens: int, group: Group = ALONE
    ) -> None:
        """Make the places of a model ready for adapters of steps of `max_tokens`; none is there."""
        self._dtype, self._device, self._ranks = plan.dtype, plan.device, group
        self._asked = plan.config.adapter_memory
        named = plan.config.adapters, plan.config.adapter_dir, plan.config.adapter_root
        self.are_expected = self._asked != 0 and any([*named, self._asked])
        self._groups = StepGroups()
        self._stored: dict[int, AdapterWeights] = {}  # in host memory
        self._loaded: dict[int, Loaded] = {}  # on the device
        self._loads = Loads(plan.device, self._copy)
        self._late: list[int] = []  # loads that wait until other ranks have their parts
        self.page_bytes, self.num_pages = LEAST_PAGE, 0
        self._numbers = itertools.count(1)
        self.targets: Targets | None = None
        self._refusal = REFUSAL
        self._is_last = plan.model.stage == plan.model.num_stages - 1
        self._pages: dict[int, int] = {}  # of each adapter
        self._layers, self._ranks_of_stage = plan.model.tensors.layers, plan.config.tensor_parallel
        is_gpu = plan.device.type == "cuda"
        can_add = plan.dtype.itemsize == 2 if is_gpu else has_kernels(plan.dtype)
        self.by_tables = can_add and isinstance(model, Decoder)
        if isinstance(model, Decoder):
            self._take_places(plan, adapt(model, self._groups, plan.model.dims.vocab_size))
            self._tables = AdapterTables(self._own, self.page_bytes, plan.device, max_tokens)

    def _take_places(self, plan: Plan, places: Sequence[AdaptedPlace]) -> None:
        """Take the places of this rank's layers, and on rank 0 those of all stages."""
        is_gpu = plan.device.type == "cuda"
        own = TileLayout(places, not is_gpu, plan.dtype)
        self._own = self._all = own
        self._fold = Fold(places, Kind(plan.dtype, plan.device), self._ranks, self._own_name)
        if plan.rank == 0:
            whole = plan.model.whole or plan.model
            places = of_all_stages(plan.model, plan.dtype, places)
            given = whole.tensors, plan.dtype, plan.device
            self.targets = Targets(places, *given, plan.model.stage_bounds)
            self._all = TileLayout(places, not is_gpu, plan.dtype)
        self.page_bytes = -self._ranks.agree(-own.page_bytes)
        if not self._ranks.agree(int(own.refusal is None)):
            self.by_tables = False

    def read(self, path: str, root: str = "") -> AdapterWeights:
        """Read and check a PEFT directory, of which no file lies outside `root`, if there is one.

        Raises `CheckpointError` or `ConfigError`.
        """
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return self.prepared(read_adapter(Path(path), self.targets, self._dtype, root))

    def read_task(self, task: LoraTask) -> AdapterWeights:
        """Read and check weights of a request. Raises `CheckpointError` or `ConfigError`."""
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return self.prepared(read_task(task, self.targets, self._dtype))

    def read_table(self, table: PromptTable) -> AdapterWeights:
        """Read and check embeddings of a request. Raises `CheckpointError` or `ConfigError`."""
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return self.prepared(read_table(table, self.targets, self._dtype))

    def prepared(self, weights: AdapterWeights) -> ReadAdapter:
        """Make of an adapter what can be made in any thread."""
        host = laid = None
        # Magnitudes are folded by all ranks together, those without any of its terms included.
        if self.by_tables and not weights.has_magnitudes:
            host = self._tables.lay_out(weights.terms, _MOST_FILLED * bytes_of(weights.terms))
        if host is not None and self._device.type == "cpu":
            laid = self._tables.place(host)
        own = weights.terms, weights.digest, weights.rank, weights.others
        given = (*own, weights.has_magnitudes, weights.of_inputs)
        pages = (
            host.num_pages if host and not (laid or weights.others) else self._pages_for(weights)
        )
        return ReadAdapter(*given, pages, host, laid)

    def reserve(self, left: int) -> int:
        """Give the pool its pages, of `left` bytes of the device; return what is left for others.

        Raises `ConfigError` if `adapter_memory` is more than that.
        """
        asked = self._asked
        size = default_pool(left, self._device) if asked is None else asked
        if asked is not None and asked > left:
            raise ConfigError(
                f"adapter_memory = {asked}: {asked / 1e9:.2f} GB, but {left / 1e9:.2f} GB are free"
            )
        self.num_pages = self._ranks.agree(size // self.page_bytes)
        return left if asked is None else left - asked

    def room_refusal(self, weights: AdapterWeights) -> str | None:
        """Say why an adapter never fits into the pool; None: it does."""
        pages = self._pages_for(weights)
        if pages <= self.num_pages:
            return None
        return (
            f"takes {pages} pages of {self.page_bytes} bytes, but there are {self.num_pages} for "
            f"adapters on the device (adapter_memory): it has {weights.num_bytes} bytes"
        )

    def store(self, weights: AdapterWeights) -> int:
        """Keep an adapter in host memory; return its number.

        Raises `CheckpointError` if magnitudes lead to numbers that the model's dtype does not have.
        """
        number = next(self._numbers)
        self._ranks.give_adapter(number, weights)
        self._pages[number] = self._pages_for(weights)
        self.keep(number, weights)
        if number not in self._stored:
            del self._pages[number]
            raise CheckpointError(
                "magnitudes (use_dora): B, times them and the scaling, holds NaN, infinity or "
                f"values beyond {str(self._dtype).removeprefix('torch.')}"
            )
        return number

    def _own_name(self, place: str) -> str:
        """Return a place's name as the decoder of this stage has it."""
        return place if self._layers is None else self._layers.own(place)

    def keep(self, number: int, weights: AdapterWeights) -> None:
        """Keep what this rank has of an adapter in host memory, unless ranks find by magnitudes
        that it cannot be. Of one that is laid out nothing else is kept.
        """
        if isinstance(weights, ReadAdapter) and weights.host is not None:
            self._stored[number] = replace(weights, terms={}, others=())
            return
        terms: PlaceTerms | None = weights.terms
        if weights.has_magnitudes:
            terms = self._fold(weights)
        if terms is not None:
            terms = {self._own_name(name): found for name, found in terms.items()}
            self._stored[number] = replace(weights, terms=terms, others=(), has_magnitudes=False)

    def add(self, weights: AdapterWeights) -> int:
        """Store an adapter, and copy it to the device at once; return its number."""
        number = self.store(weights)
        self._ranks.give_all(number)
        self.start_load(number)
        self.settle(number)
        return number

    def pages_of(self, number: int) -> int:
        """Return how many pages an adapter takes, on the stage where it takes most."""
        return self._pages[number]

    @property
    def num_free_bytes(self) -> int:
        """Bytes of the pool that no adapter on the device has."""
        return self.page_bytes * (self.num_pages - sum(map(self.pages_of, self._loaded)))

    def _pages_for(self, weights: AdapterWeights) -> int:
        if isinstance(weights, ReadAdapter):
            return weights.num_pages
        of_stages = (weights.terms, *weights.others)[:: self._ranks_of_stage]
        return max(self._pages_of(terms) for terms in of_stages)

    def _pages_of(self, terms: PlaceTerms) -> int:
        count = self._all.num_pages(terms) if self.by_tables else None
        return -(-bytes_of(terms) // self.page_bytes) if count is None else count

    def start_load(self, number: int) -> None:
        """Start to copy an adapter to the device; `take_loaded` says when it is there.

        Other ranks get their parts first, with steps or in `take_loaded`.
        """
        if self._ranks.is_giving(number):
            self._late.append(number)
            return
        self._ranks.order(AdapterOrder.LOAD, number)
        self._loads.start(number, self._stored[number])

    def take_loaded(self, seconds: float = 0.0) -> Sequence[tuple[int, Exception | None]]:
        """Take the adapters that have arrived, and why one did not; wait for one at most so long.

        An error is one of memory, or of the device.
        """
        if self._late:
            self._start_late(has_time=bool(seconds))
        found: list[tuple[int, Exception | None]] = []
        for number, load in self._loads.take(seconds):
            try:
                self._loaded[number] = load.result()
            except Exception as error:
                _log.error("adapter %d could not be copied to the device", number, exc_info=error)
                found.append((number, error))
            else:
                found.append((number, None))
        return found

    def _start_late(self, has_time: bool) -> None:
        """Start loads whose parts other ranks have got by now; no step runs if there is time."""
        late, self._late = self._late, []
        for number in late:
            if has_time:
                self._ranks.give_all(number)
            else:
                self._ranks.give_some()
            self.start_load(number)

    def evict(self, number: int) -> None:
        """Give up an adapter's memory on the device; launched steps keep it to their end."""
        self._ranks.order(AdapterOrder.EVICT, number)
        self._discard(number)

    def remove(self, number: int) -> None:
        """Discard an adapter; steps that were launched with it keep it to their end."""
        self._ranks.order(AdapterOrder.REMOVE, number)
        self._discard(number)
        self._pages.pop(number, None)
        del self._stored[number]

    def _discard(self, number: int) -> None:
        if (loaded := self._loaded.pop(number, None)) is not None:
            self._loads.evict(loaded)

    def _copy(self, weights: AdapterWeights) -> Loaded:
        host = laid = None
        if isinstance(weights, ReadAdapter):
            host, laid = weights.host, weights.laid
        if host is None and self.by_tables:
            host = self._tables.lay_out(weights.terms)
        if host is not None and laid is None:
            laid = self._tables.place(host)
        if laid is not None:
            return Loaded({}, laid)
        own: Terms = {
            place: tuple(term.to(self._device) for term in terms)
            for place, terms in weights.terms.items()
        }
        return Loaded(own, None)

    def settle(self, number: int) -> None:
        """Wait until an adapter that is being loaded has arrived. Raises why it does not."""
        if number in self._loads:
            self._loads.wait_for(number)
            for _, error in self.take_loaded():
                if error is not None:
                    raise error

    def of(self, batch: Batch) -> Active:
        """Return the adapters that rows of a batch have."""
        if not self._loaded:
            return {}
        return self.named({row.adapter for row in batch.rows})

    def named(self, numbers: Iterable[int]) -> Active:
        """Return those of some numbers; 0 is none."""
        return {number: self._loaded[number] for number in sorted(numbers) if number}

    def can_be_graph(self, active: Active) -> bool:
        """Whether a step with these adapters can be a graph: kernels add all terms."""
        return not _by_torch(active)

    @property
    def kinds_of_steps(self) -> Sequence[bool]:
        """Whether a step with adapters looks for terms of experts: all answers that there are."""
        return (False, True) if self._own.experts else (False,)

    @staticmethod
    def have_experts(active: Active) -> bool:
        """Whether adapters that kernels add have terms of experts, which take kernels more."""
        return any(each.laid is not None and each.laid.expert_address for each in active.values())

    @torch.inference_mode()
    def upload(
        self,
        active: Active,
        tokens: Int64s,
        shape: StepShape,
        arrays: StepArrays,
        keeps_all: bool,
        has_experts: bool = False,
    ) -> Uploaded:
        """Copy to the device what kernels read of the adapters of a step's `tokens`."""
        kept = tokens[arrays.sample_rows] if self._has_kept(shape, keeps_all) else None
        laid = {number: each.laid for number, each in active.items() if each.laid is not None}
        looks = has_experts or self.have_experts(active)
        return self._tables.upload(tokens, kept, laid, shape, looks)

    def prepare(
        self, shape: StepShape, arrays: StepArrays, has_experts: bool
    ) -> Mapping[str, Table]:
        """Return tables of padding, where those of a graph's steps are going to lie."""
        none = np.zeros(shape.num_tokens, np.int64)
        made = self.upload({}, none, shape, arrays, keeps_all=False, has_experts=has_experts)
        assert made.is_home, "there is room for the tables of all graphs"
        return {name: table._replace(width=WIDEST) for name, table in made.tables.items()}

    @contextmanager
    def having(self, tables: Mapping[str, Table]) -> Iterator[None]:
        """Have the places add the terms that tables say, in what runs inside."""
        self._groups.tables = tables
        try:
            yield
        finally:
            self._groups.clear()

    @contextmanager
    def step(
        self,
        active: Active,
        tokens: Int64s,
        shape: StepShape,
        arrays: StepArrays,
        keeps_all: bool = False,
    ) -> Iterator[None]:
        """Have the places add the terms of `active` in what runs inside; none: nothing changes.

        Args:
            active: the step's adapters.
            tokens: the adapter of each token; see `adapters_of`.
            shape, arrays: the step's.
            keeps_all: the model's last block goes on with all tokens, not the sampled alone.
        """
        if not active:
            yield
            return
        groups, by_torch = self._groups, _by_torch(active)
        if len(by_torch) < len(active):
            laid = {n: each for n, each in active.items() if n not in by_torch}
            own = np.where(np.isin(tokens, [*by_torch]), 0, tokens) if by_torch else tokens
            groups.tables = self.upload(laid, own, shape, arrays, keeps_all).tables
        if by_torch:
            self._group(by_torch, tokens, shape, arrays, keeps_all)
        try:
            yield
        finally:
            groups.clear()

    def _group(
        self, active: Active, tokens: Int64s, shape: StepShape, arrays: StepArrays, keeps_all: bool
    ) -> None:
        """Make the groups of a step; arguments are those of `step`."""
        has_kept = self._has_kept(shape, keeps_all)
        kept = tokens[arrays.sample_rows] if has_kept else tokens
        groups = self._groups
        groups.tokens = self._grouped(tokens, active)
        groups.kept = self._grouped(kept, active) if has_kept else groups.tokens
        groups.sampled = groups.kept
        if keeps_all:  # the head is called for parts of prompts, and then for samples
            groups.sampled = self._grouped(tokens[arrays.sample_rows], active)
        else:
            groups.head = groups.sampled

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Have the head add terms to rows that are sampled, in a step that keeps all tokens."""
        groups = self._groups
        before, groups.head = groups.head, groups.sampled
        try:
            yield
        finally:
            groups.head = before

    @contextmanager
    def end(self, active: Active, tokens: Int64s, arrays: StepArrays) -> Iterator[None]:
        """Have the head add terms to rows that are sampled, where they come from another stage."""
        if by_torch := _by_torch(active):
            self._groups.head = self._grouped(tokens[arrays.sample_rows], by_torch)
        try:
            yield
        finally:
            self._groups.clear()

    def _has_kept(self, shape: StepShape, keeps_all: bool) -> bool:
        """Whether the last block that is here goes on with some of the tokens."""
        return self._is_last and shape.num_decodes < shape.num_tokens and not keeps_all

    def _grouped(self, numbers: Int64s, active: Active) -> list[RowGroup]:
        """Group rows by their adapters."""
        found = [(each.terms, (numbers == n).nonzero()[0]) for n, each in active.items()]
        there = ((terms, torch.from_numpy(rows)) for terms, rows in found if len(rows))
        return [RowGroup(terms, rows.to(self._device)) for terms, rows in there]


def _by_torch(active: Active) -> Active:
    """Return those whose terms torch adds; kernels add those of the others."""
    return {n: each for n, each in active.items() if each.laid is None}
