"""The places of a model that adapters change, whatever rank or stage has them."""

from collections.abc import Sequence

import torch

from slipstream.fuse.adapt import AdaptedPlace, adapt
from slipstream.layers.adapted import StepGroups
from slipstream.layers.decoder import Decoder
from slipstream.models.decoder import build_any
from slipstream.models.fileless import SizeSource
from slipstream.models.model_config import ModelConfig
from slipstream.models.source import Weights


def of_all_stages(
    model: ModelConfig, dtype: torch.dtype, places: Sequence[AdaptedPlace]
) -> Sequence[AdaptedPlace]:
    """Return the places of all stages, those of others without weights, of the first one's."""
    if model.whole is None:
        return places
    weights = Weights(SizeSource(), torch.device("meta"), dtype)
    decoder = build_any(model.whole, weights, max_model_len=1)
    assert isinstance(decoder, Decoder), "classes of transformers have no stages"
    own = {each.name: each for each in places}
    found = adapt(decoder, StepGroups(), model.dims.vocab_size)
    return [own.get(each.name, each) for each in found]
