"""Executes a `Batch` on the device: stage inputs, run the model, draw tokens. Knows no request."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.arrays import sampling_arrays, token_arrays
from slipstream.engine.batch import Batch, Sampled
from slipstream.engine.graphs import Buckets, Graphs
from slipstream.engine.plan import Plan
from slipstream.engine.staging import Staging
from slipstream.layers.attention import AttentionInputs
from slipstream.models.registry import build
from slipstream.models.weights import FileSource, RandomSource, Weights
from slipstream.sampling.sampler_before import SamplingInputs, draw


def _load(plan: Plan) -> Weights:
    is_random = plan.config.load_format == "random"
    source = RandomSource(plan.device) if is_random else FileSource(plan.checkpoint, plan.device)
    return Weights(source, plan.device, plan.dtype, plan.config.quantization)


class ModelRunner:
    """The model, its paged cache, the buffers of a step and, on a GPU, the graphs of decodes."""

    @torch.inference_mode()
    def __init__(self, plan: Plan) -> None:
        if plan.num_threads is not None:
            torch.set_num_threads(plan.num_threads)
        self.num_blocks = plan.num_blocks
        self.block_size = plan.block_size
        self.vocab_size = plan.model.dims.vocab_size
        self.max_model_len = plan.max_model_len
        self._num_heads = plan.model.dims.num_heads
        self._model = build(plan.model, _load(plan), plan.max_model_len)
        self._caches = self._make_caches(plan)
        self._tokens = Staging(plan.device)
        self._sampling = Staging(plan.device)
        uses_graphs = plan.device.type == "cuda" and plan.config.cuda_graphs
        self._graphs = self._make_graphs(plan) if uses_graphs else None

    @staticmethod
    def _make_caches(plan: Plan) -> list[Tensor]:
        """One a layer, zeroed: padding may be multiplied by 0 and must be finite for that."""
        d = plan.model.dims
        shape = (plan.num_blocks, d.num_kv_heads, 2, plan.block_size, d.head_size)
        return [
            torch.zeros(shape, dtype=plan.dtype, device=plan.device) for _ in range(d.num_layers)
        ]

    def _make_graphs(self, plan: Plan) -> Graphs:
        buckets = Buckets(plan.max_num_seqs, plan.max_model_len, plan.block_size)
        shape = (buckets.rows[-1], plan.model.dims.vocab_size)
        logits = torch.empty(shape, dtype=plan.dtype, device=plan.device)
        graphs = Graphs(self._forward, buckets, logits)
        graphs.warm_up()
        return graphs

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """One step. Returns when the sampled tokens are known."""
        logits = self.logits(batch)
        if len(logits) == 0:
            return Sampled([], [], [])
        # Only now, so that on a GPU the model already runs meanwhile.
        rows = [row for row in batch.rows if row.samples]
        inputs = SamplingInputs(*self._sampling.upload(sampling_arrays(rows)))
        token_ids, log_probs, is_finite = draw(logits, inputs)
        # One read for all three; fp64 holds every token id exactly.
        drawn = torch.stack((token_ids.double(), log_probs.double(), is_finite.double())).cpu()
        ids, probs, finite = drawn.numpy()
        return Sampled(ids.astype(np.int64).tolist(), probs.tolist(), (finite != 0).tolist())

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Unedited fp32 logits `[rows that sample, vocab]`; the cache is written as by `run`."""
        tokens = token_arrays(batch, self.block_size)
        if self._graphs is not None and batch.num_decodes == len(batch.rows):
            logits = self._graphs.run(tokens)
            if logits is not None:
                return logits.float()
        chunks = batch.rows[batch.num_decodes :]
        max_queries = max((len(row.token_ids) for row in chunks), default=0)
        return self._forward(self._tokens.upload(tokens), batch.num_decodes, max_queries).float()

    def _forward(self, staged: Sequence[Tensor], num_decodes: int, max_queries: int) -> Tensor:
        """`[rows that sample, vocab]` of `TokenArrays` on the device."""
        token_ids, sample_rows, positions, slots, tables, starts, lengths = staged
        inputs = AttentionInputs.of(
            self._caches[0],
            self._num_heads,
            positions,
            slots,
            tables,
            starts,
            lengths,
            num_decodes,
            max_queries,
        )
        return self._model(token_ids, inputs, self._caches, sample_rows)
