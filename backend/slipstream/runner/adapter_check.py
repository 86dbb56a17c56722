"""Check, without the model's weights, the adapters that an engine would start with."""

from pathlib import Path

import torch
from slipstream_contract.errors import ContractError

from slipstream.core.adapter import check_name, parse_adapters
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.adapters.read import read_adapter
from slipstream.models.adapters.targets import Targets
from slipstream.runner.adapter_places import of_all_stages, places_of
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
    model, dtype = plan.model, plan.dtype
    places = of_all_stages(model, dtype, places_of(model, dtype))
    tensors = (model.whole or model).tensors
    return Targets(list(places), tensors, dtype, torch.device("meta"), model.stage_bounds)
