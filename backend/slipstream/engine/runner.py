"""Executes a `Batch` on the device: stage inputs, run the model, draw tokens. Knows no request."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.batch import Batch, Row, Sampled
from slipstream.engine.plan import Plan
from slipstream.engine.staging import Array, Staging
from slipstream.layers.attention import AttentionInputs
from slipstream.models.registry import build
from slipstream.models.weights import FileSource, RandomSource, Weights
from slipstream.sampling.sampler import SamplingInputs, draw


def _load(plan: Plan) -> Weights:
    is_random = plan.config.load_format == "random"
    source = RandomSource(plan.device) if is_random else FileSource(plan.checkpoint)
    return Weights(source, plan.device, plan.dtype)


def _block_tables(rows: tuple[Row, ...]) -> NDArray[np.int32]:
    """`[rows, longest]`, padded with block 0, whose content is never used."""
    counts = np.array([len(row.block_ids) for row in rows], np.int64)
    tables = np.zeros((len(rows), int(counts.max())), np.int32)
    flat = np.fromiter(chain.from_iterable(row.block_ids for row in rows), np.int32, counts.sum())
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables


class ModelRunner:
    """The model, its paged cache and the buffers of a step."""

    def __init__(self, plan: Plan) -> None:
        if plan.num_threads is not None:
            torch.set_num_threads(plan.num_threads)
        self.num_blocks = plan.num_blocks
        self.block_size = plan.block_size
        self.vocab_size = plan.model.dims.vocab_size
        self.max_model_len = plan.max_model_len
        self._device = plan.device
        with torch.inference_mode():
            self._model = build(plan.model, _load(plan), plan.max_model_len)
            self._caches = self._make_caches(plan)
        self._staging = Staging(plan.device)

    @staticmethod
    def _make_caches(plan: Plan) -> list[Tensor]:
        """One a layer, zeroed: padding may be multiplied by 0 and must be finite for that."""
        d = plan.model.dims
        shape = (plan.num_blocks, d.num_kv_heads, 2, plan.block_size, d.head_size)
        return [
            torch.zeros(shape, dtype=plan.dtype, device=plan.device) for _ in range(d.num_layers)
        ]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """One step. Returns when the sampled tokens are known."""
        step = self._stage(batch)
        logits = self._forward(step)
        if len(step.sample_rows) == 0:
            return Sampled([], [], [])
        token_ids, log_probs, is_finite = draw(logits, step.sampling)
        # One read for all three; fp64 holds every token id exactly.
        drawn = torch.stack((token_ids.double(), log_probs.double(), is_finite.double())).cpu()
        ids, probs, finite = drawn.numpy()
        return Sampled(ids.astype(np.int64).tolist(), probs.tolist(), (finite != 0).tolist())

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Unedited fp32 logits `[rows that sample, vocab]`; the cache is written as by `run`."""
        return self._forward(self._stage(batch))

    def _forward(self, step: "_Step") -> Tensor:
        return self._model(step.token_ids, step.attention, self._caches, step.sample_rows)

    def _stage(self, batch: Batch) -> "_Step":
        tokens = _token_arrays(batch, self.block_size)
        rows = [row for row in batch.rows if row.samples]
        staged = self._staging.upload([*tokens, *_sampling_arrays(rows)])
        token_ids, sample_rows, positions, slots, tables, starts, lengths = staged[: len(tokens)]
        chunks = batch.rows[batch.num_decodes :]
        attention = AttentionInputs(
            positions=positions,
            slots=slots,
            block_tables=tables,
            query_starts=starts,
            lengths=lengths,
            num_decodes=batch.num_decodes,
            max_queries=max((len(row.token_ids) for row in chunks), default=0),
        )
        return _Step(token_ids, sample_rows, attention, SamplingInputs(*staged[len(tokens) :]))


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch on the device."""

    token_ids: Tensor  # [n] i64
    sample_rows: Tensor  # [r] i64, of the n tokens
    attention: AttentionInputs
    sampling: SamplingInputs


def _token_arrays(batch: Batch, block_size: int) -> list[Array]:
    """Token ids, rows to sample, then the tensors of `AttentionInputs` in order."""
    rows, num_decodes = batch.rows, batch.num_decodes
    counts = np.array([len(row.token_ids) for row in rows], np.int64)
    first_positions = np.array([row.start for row in rows], np.int64)
    ends = counts.cumsum()
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(owners)) - (ends - counts - first_positions)[owners]
    tables = _block_tables(rows)
    blocks = tables[owners, positions // block_size].astype(np.int64)
    return [
        np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, len(owners)),
        (ends - 1)[[row.samples for row in rows]],
        positions,
        blocks * block_size + positions % block_size,
        tables,
        (np.append(0, ends)[num_decodes:] - num_decodes).astype(np.int32),
        (first_positions + counts).astype(np.int32),
    ]


def _sampling_arrays(rows: list[Row]) -> list[Array]:
    """The fields of `SamplingInputs`, in order."""
    params = [row.sampling for row in rows]
    edits = [(i, edit) for i, row in enumerate(rows) for edit in row.edits]
    return [
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([row.seed % 2**64 for row in rows], np.uint64).view(np.int64),
        np.array([row.num_outputs for row in rows], np.int64),
        np.array([i for i, _ in edits], np.int64),
        np.array([edit.token_id for _, edit in edits], np.int64),
        np.array([edit.factor for _, edit in edits], np.float32),
        np.array([edit.addend for _, edit in edits], np.float32),
    ]
