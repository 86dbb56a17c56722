"""The places of a model that adapters change, whatever rank or stage has them."""

from collections.abc import Sequence

import torch

from slipstream.errors import ConfigError
from slipstream.fuse.adapt import AdaptedPlace, adapt
from slipstream.layers.adapted import StepGroups
from slipstream.layers.decoder import Decoder
from slipstream.models.decoder import build_any
from slipstream.models.fileless import SizeSource
from slipstream.models.model_config import ModelConfig
from slipstream.models.source import Weights

REFUSAL = "backend_model = 'transformers' serves no adapters"


def places_of(model: ModelConfig, dtype: torch.dtype) -> Sequence[AdaptedPlace]:
    """Return the places of a model whose matrices have sizes alone. Raises `ConfigError`."""
    weights = Weights(SizeSource(), torch.device("meta"), dtype)
    decoder = build_any(model, weights, max_model_len=1)
    if not isinstance(decoder, Decoder):
        raise ConfigError(REFUSAL)
    return adapt(decoder, StepGroups(), model.dims.vocab_size)


def of_all_stages(
    model: ModelConfig, dtype: torch.dtype, places: Sequence[AdaptedPlace]
) -> Sequence[AdaptedPlace]:
    """Return the places of all stages, those of others without weights, of the first one's."""
    if model.whole is None:
        return places
    own = {each.name: each for each in places}
    return [own.get(each.name, each) for each in places_of(model.whole, dtype)]
