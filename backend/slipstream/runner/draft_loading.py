"""Load the drafter of a plan, with its weights, and tap the model's states for it."""

from dataclasses import replace
from typing import NamedTuple

import torch

from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.layers.embedding import Head, Table, embedding_and_head
from slipstream.models.axes import TensorNames
from slipstream.models.decoder import build
from slipstream.models.drafts.eagle3 import Eagle3, read_draft_ids
from slipstream.models.drafts.medusa import FILE, NAMES, load_medusa
from slipstream.models.fileless import RandomSource
from slipstream.models.files import SINGLE
from slipstream.models.model_config import ModelConfig
from slipstream.models.source import Source, Weights
from slipstream.models.weights import FileSource
from slipstream.runner.draft_plan import DraftPlan
from slipstream.runner.drafters import (
    Drafter,
    Eagle3Drafter,
    MedusaDrafter,
    ModelDrafter,
    Taps,
    tap_blocks,
    tap_head,
)
from slipstream.runner.plan import Plan


def _weights(plan: Plan, draft: DraftPlan, tensors: TensorNames, single: str = SINGLE) -> Weights:
    source: Source = RandomSource(plan.device)
    if plan.config.load_format != "random":
        source = FileSource(draft.checkpoint, plan.device, tensors, single)
    return Weights(source, plan.device, plan.dtype)


def _model_drafter(plan: Plan, draft: DraftPlan, config: ModelConfig) -> Drafter:
    """Load a smaller model, which drafts."""
    assert draft.attention is not None
    model = build(config, _weights(plan, draft, config.tensors), plan.max_model_len)
    size, length = plan.model.dims.vocab_size, plan.max_model_len
    return ModelDrafter(model, config.windows, draft.attention, size, length, plan.device)


@torch.inference_mode()
def load_drafter(
    plan: Plan, draft: DraftPlan, decoder: StepDecoder, num_rows: int, num_tokens: int
) -> Drafter:
    """Load the drafter, and change the model so that it keeps the states that the drafter reads.

    Args:
        plan: of the model.
        draft: of the drafter.
        decoder: the model.
        num_rows, num_tokens: of the largest step.
    """
    d = plan.model.dims
    if draft.model is not None:
        return _model_drafter(plan, draft, draft.model)
    assert isinstance(decoder, Decoder), "its states are those of a family's layers"
    ends = _ends(plan, decoder)
    taps = tap(plan, draft, decoder, num_rows, num_tokens)
    assert taps is not None, "it reads states"
    if draft.medusa is not None:
        w = _weights(plan, draft, NAMES, FILE)
        return MedusaDrafter(load_medusa(w, draft.medusa, ends.head), taps)
    config = draft.eagle3
    assert config is not None
    assert draft.attention is not None
    w = _weights(plan, draft, config.tensors)
    draft_ids = None
    if plan.config.load_format != "random":
        draft_ids = read_draft_ids(draft.checkpoint, config.draft_vocab_size, d.vocab_size)
    elif config.draft_vocab_size != d.vocab_size:
        draft_ids = torch.arange(config.draft_vocab_size)
    if draft_ids is not None:
        draft_ids = draft_ids.to(plan.device)
    head = Eagle3(w, config, ends.embedding, draft_ids, plan.max_model_len)
    w.finish()
    return Eagle3Drafter(head, draft.attention, taps, plan.max_model_len)


def tap(
    plan: Plan, draft: DraftPlan, decoder: StepDecoder, num_rows: int, num_tokens: int
) -> Taps | None:
    """Change the model so that it keeps the states that the drafter reads; None: it reads none.

    Where ranks share the model, the drafter is on rank 0, and all keep them, so that all add the
    same sums in the same way. For the arguments see `load_drafter`.
    """
    size, where = plan.model.dims.hidden_size, (plan.dtype, plan.device)
    if draft.medusa is not None:
        assert isinstance(decoder, Decoder), "its states are those of a family's layers"
        taps = Taps(num_rows, size, 1, *where)
        tap_head(decoder, taps)
        return taps
    if draft.eagle3 is not None:
        assert isinstance(decoder, Decoder), "its states are those of a family's layers"
        taps = Taps(num_tokens, size, len(draft.eagle3.layers), *where)
        tap_blocks(decoder, draft.eagle3.layers, taps)
        return taps
    return None


class _Ends(NamedTuple):
    """The model's embedding and head, all rows of both."""

    embedding: Table
    head: Head


def _ends(plan: Plan, decoder: Decoder) -> _Ends:
    """Return the tables that drafters of its states read; of several ranks' they are read again,
    whole.
    """
    model = plan.model
    if model.num_ranks == 1:
        return _Ends(decoder.embedding.table, decoder.head)
    tensors = replace(model.tensors, cuts=None)
    source: Source = RandomSource(plan.device)
    if plan.config.load_format != "random":
        source = FileSource(plan.checkpoint, plan.device, tensors)
    w = Weights(source, plan.device, plan.dtype, plan.config.quantization)
    embedding, head = embedding_and_head(w, model.dims, model.ties_embeddings)
    return _Ends(embedding.table, head)
