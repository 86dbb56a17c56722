"""Check, without the model's weights, the adapters that an engine would start with."""

from pathlib import Path

import torch
from slipstream_contract.errors import ContractError

from slipstream.core.adapter import check_name, parse_adapters
from slipstream.errors import CheckpointError, ConfigError
from slipstream.fuse.adapt import adapt
from slipstream.layers.adapted import StepGroups
from slipstream.layers.decoder import Decoder
from slipstream.models.adapters.read import read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.models.decoder import build_any
from slipstream.models.fileless import SizeSource
from slipstream.models.source import Weights
from slipstream.runner.adapter_places import of_all_stages
from slipstream.runner.plan import Plan


def check_adapters(plan: Plan) -> None:
    """Read each adapter of the option `adapters` as the engine's start does.

    The room on the device is not checked, nor what is computed of the model's own numbers
    (magnitudes, a stored base). Raises `ConfigError`, which names the adapter.
    """
    try:
        named = parse_adapters(plan.config.adapters)
        for name in named:
            check_name(name, plan.model_name)
    except ContractError as error:
        raise ConfigError(error.message) from None
    if not named:
        return
    targets = _targets(plan)
    for name, path in named.items():
        try:
            read_adapter(Path(path), targets, plan.dtype)
        except CheckpointError as error:
            raise ConfigError(f"adapters: {name}: {error}") from None


def _targets(plan: Plan) -> Targets:
    """Return what adapters can change of a model, whose matrices have sizes alone."""
    meta = torch.device("meta")
    decoder = build_any(plan.model, Weights(SizeSource(), meta, plan.dtype), max_model_len=1)
    if not isinstance(decoder, Decoder):
        raise ConfigError("backend_model = 'transformers' serves no adapters")
    places = adapt(decoder, StepGroups(), plan.model.dims.vocab_size)
    places = list(of_all_stages(plan.model, plan.dtype, places))
    whole = plan.model.whole or plan.model
    return Targets(places, whole.tensors, plan.dtype, meta, plan.model.stage_bounds)
