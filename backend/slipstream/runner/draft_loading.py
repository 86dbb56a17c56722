"""Load the drafter of a plan, with its weights, and tap the model's states for it."""

import torch

from slipstream.layers.decoder import Decoder, StepDecoder
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
    where = (plan.dtype, plan.device)
    if draft.model is not None:
        return _model_drafter(plan, draft, draft.model)
    assert isinstance(decoder, Decoder), "its states are those of a family's layers"
    if draft.medusa is not None:
        w = _weights(plan, draft, NAMES, FILE)
        heads = load_medusa(w, draft.medusa, decoder.head.table.weight)
        taps = Taps(num_rows, d.hidden_size, 1, *where)
        tap_head(decoder, taps)
        return MedusaDrafter(heads, taps)
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
    head = Eagle3(w, config, decoder.embedding.table.weight, draft_ids, plan.max_model_len)
    w.finish()
    taps = Taps(num_tokens, d.hidden_size, len(config.layers), *where)
    tap_blocks(decoder, config.layers, taps)
    return Eagle3Drafter(head, draft.attention, taps, plan.max_model_len)
