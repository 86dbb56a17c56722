"""Adapters on the device, by number, and the rows of a step that have each."""

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.errors import ConfigError
from slipstream.fuse.adapt import adapt
from slipstream.kernels.lora.terms import Table
from slipstream.layers.adapted import Group, StepGroups, Terms
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.models.adapters.legacy import read_table, read_task
from slipstream.models.adapters.read import AdapterWeights, read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.runner.adapter_tables import WIDEST, AdapterTables, Laid, Uploaded
from slipstream.runner.plan import Plan
from slipstream.runner.step_arrays import Int64s, StepArrays, StepShape, gap_of


class Loaded(NamedTuple):
    """An adapter on the device."""

    terms: Terms
    laid: Laid | None  # as kernels find it; None: torch adds its terms


Active = Mapping[int, Loaded]  # the adapters of a step, by number


class Adapters:
    """The adapters that steps may use. `read` may run in any thread, all else in the runner's.

    A number is used once. A launched step keeps the tensors that it uses, so an adapter can be
    removed at any time.

    `by_tables`: whether kernels add the terms that they take, on a GPU in 16 bits; else torch adds
    all, one after another.
    """

    def __init__(self, plan: Plan, model: StepDecoder, max_tokens: int) -> None:
        """Make the places of a model ready for adapters of steps of `max_tokens`; none is there."""
        self._dtype, self._device = plan.dtype, plan.device
        self._groups = StepGroups()
        self._loaded: dict[int, Loaded] = {}
        self._numbers = itertools.count(1)
        self._read: dict[int, AdapterWeights] = {}
        self._lock = threading.Lock()
        self.targets: Targets | None = None
        self._refusal = "backend_model = 'transformers' serves no adapters"
        if plan.model.num_ranks > 1:
            self._refusal = f"tensor_parallel = {plan.model.num_ranks} serves no adapters"
        elif isinstance(model, Decoder):
            places = adapt(model, self._groups)
            self.targets = Targets(places, plan.model.tensors, plan.dtype, plan.device)
            self._tables = AdapterTables(places, plan.device, max_tokens)
        self.by_tables = plan.device.type == "cuda" and plan.dtype.itemsize == 2

    def read(self, path: str) -> AdapterWeights:
        """Read and check a PEFT directory. Raises `CheckpointError` or `ConfigError`."""
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return read_adapter(Path(path), self.targets, self._dtype)

    def read_task(self, task: LoraTask) -> AdapterWeights:
        """Read and check weights of a request. Raises `CheckpointError` or `ConfigError`."""
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return read_task(task, self.targets, self._dtype)

    def read_table(self, table: PromptTable) -> AdapterWeights:
        """Read and check embeddings of a request. Raises `CheckpointError` or `ConfigError`."""
        if self.targets is None:
            raise ConfigError(self._refusal)
        with torch.inference_mode():
            return read_table(table, self.targets, self._dtype)

    def add(self, weights: AdapterWeights) -> int:
        """Copy an adapter to the device; return its number."""
        number = next(self._numbers)
        terms: Terms = {
            place: tuple(term.to(self._device) for term in terms)
            for place, terms in weights.terms.items()
        }
        laid = None
        if self.by_tables:
            with torch.inference_mode():
                terms, laid = self._tables.lay_out(terms)
        self._loaded[number] = Loaded(terms, laid)
        return number

    def remove(self, number: int) -> None:
        """Discard an adapter; steps that were launched with it keep it to their end."""
        del self._loaded[number]

    def of(self, batch: Batch) -> Active:
        """Return the adapters that rows of a batch have."""
        if not self._loaded:
            return {}
        numbers = {row.adapter for row in batch.rows}
        return {number: self._loaded[number] for number in sorted(numbers) if number}

    def can_be_graph(self, active: Active) -> bool:
        """Whether a step with these adapters can be a graph."""
        return not active or self._are_laid(active)

    def _are_laid(self, active: Active) -> bool:
        """Whether kernels add all terms of a step."""
        return self.by_tables and all(each.laid is not None for each in active.values())

    @torch.inference_mode()
    def upload(
        self, active: Active, batch: Batch, shape: StepShape, arrays: StepArrays, keeps_all: bool
    ) -> Uploaded:
        """Copy to the device what kernels read of the adapters of a step's rows."""
        tokens = numbers_of(batch, shape)
        kept = tokens[arrays.sample_rows] if _has_kept(shape, keeps_all) else None
        laid = {number: each.laid for number, each in active.items() if each.laid is not None}
        return self._tables.upload(tokens, kept, laid, shape)

    def prepare(self, shape: StepShape, arrays: StepArrays) -> Mapping[str, Table]:
        """Return tables of padding, where those of a graph's steps are going to lie."""
        made = self.upload({}, Batch((), 0), shape, arrays, keeps_all=False)
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
        batch: Batch,
        shape: StepShape,
        arrays: StepArrays,
        keeps_all: bool = False,
    ) -> Iterator[None]:
        """Have the places add the terms of `active` in what runs inside; none: nothing changes.

        `keeps_all`: the last block goes on with all tokens, not with the sampled alone.
        """
        if not active:
            yield
            return
        if self._are_laid(active):
            with self.having(self.upload(active, batch, shape, arrays, keeps_all).tables):
                yield
            return
        tokens = numbers_of(batch, shape)
        has_kept = _has_kept(shape, keeps_all)
        kept = tokens[arrays.sample_rows] if has_kept else tokens
        groups = self._groups
        groups.tokens = self._grouped(tokens, active)
        groups.kept = self._grouped(kept, active) if has_kept else groups.tokens
        groups.sampled = groups.kept
        if keeps_all:  # the head is called for parts of prompts, and then for samples
            groups.sampled = self._grouped(tokens[arrays.sample_rows], active)
        else:
            groups.head = groups.sampled
        try:
            yield
        finally:
            groups.clear()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Have the head add terms to rows that are sampled, in a step that keeps all tokens."""
        groups = self._groups
        before, groups.head = groups.head, groups.sampled
        try:
            yield
        finally:
            groups.head = before

    def _grouped(self, numbers: Int64s, active: Active) -> list[Group]:
        """Group rows by their adapters."""
        found = [(each.terms, (numbers == n).nonzero()[0]) for n, each in active.items()]
        return [Group(terms, self._on_device(rows)) for terms, rows in found if len(rows)]

    def _on_device(self, rows: Int64s) -> Tensor:
        return torch.from_numpy(rows).to(self._device)


def _has_kept(shape: StepShape, keeps_all: bool) -> bool:
    """Whether the last block goes on with some of the tokens."""
    return shape.num_decodes < shape.num_tokens and not keeps_all


def numbers_of(batch: Batch, shape: StepShape) -> Int64s:
    """Return the adapter of each token of a step, `[num_tokens]`; 0: none, or padding."""
    numbers = np.zeros(shape.num_tokens, np.int64)
    count, (_, gap) = batch.num_decodes, gap_of(batch, shape)
    numbers[:count] = [row.adapter for row in batch.rows[:count]]
    chunks = batch.rows[count:]
    sizes = [len(row.token_ids) for row in chunks]
    begin = count + gap
    numbers[begin : begin + sum(sizes)] = np.repeat([row.adapter for row in chunks], sizes)
    return numbers
