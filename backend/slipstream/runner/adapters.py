"""Adapters on the device, by number, and the rows of a step that have each."""

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from slipstream_contract.lora import LoraTask
from slipstream_contract.prompt_table import PromptTable
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.errors import ConfigError
from slipstream.fuse.adapt import adapt
from slipstream.layers.adapted import Group, StepGroups, Terms
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.models.adapters.legacy import read_table, read_task
from slipstream.models.adapters.read import AdapterWeights, read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.runner.plan import Plan
from slipstream.runner.step_arrays import Int64s, StepArrays, StepShape, gap_of

Active = Mapping[int, Terms]  # the adapters of a step, by number


class Adapters:
    """The adapters that steps may use. `read` may run in any thread, all else in the runner's.

    A number is used once. A launched step keeps the tensors that it uses, so an adapter can be
    removed at any time.
    """

    def __init__(self, plan: Plan, model: StepDecoder) -> None:
        """Make the places of a model ready for adapters; none is there yet."""
        self._dtype, self._device = plan.dtype, plan.device
        self._groups = StepGroups()
        self._loaded: dict[int, Terms] = {}
        self._numbers = itertools.count(1)
        self._read: dict[int, AdapterWeights] = {}
        self._lock = threading.Lock()
        self.targets: Targets | None = None
        self._refusal = "backend_model = 'transformers' serves no adapters"
        if plan.model.num_ranks > 1:
            self._refusal = f"tensor_parallel = {plan.model.num_ranks} serves no adapters"
        elif isinstance(model, Decoder):
            self.targets = Targets(
                adapt(model, self._groups), plan.model.tensors, plan.dtype, plan.device
            )

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
        self._loaded[number] = {
            place: tuple(term.to(self._device) for term in terms)
            for place, terms in weights.terms.items()
        }
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
        tokens = numbers_of(batch, shape)
        has_kept = shape.num_decodes < shape.num_tokens and not keeps_all
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
        found = [(terms, (numbers == number).nonzero()[0]) for number, terms in active.items()]
        return [Group(terms, self._on_device(rows)) for terms, rows in found if len(rows)]

    def _on_device(self, rows: Int64s) -> Tensor:
        return torch.from_numpy(rows).to(self._device)


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
