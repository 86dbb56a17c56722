"""The endpoints that load and unload adapters, as vLLM has them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from slipstream_gateway.errors import ApiError
from slipstream_gateway.models import Models

_LOAD_S = 600.0  # a directory of many GB from a slow disk
_UNLOAD_S = 30.0


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{name} is {value!r:.64}, not a text", name)
    return value


async def load_adapter(models: Models, body: Mapping[str, Any]) -> str:
    """Load `lora_path`, below the engine's root, as `lora_name`; return what was done.

    `model` names the base where there are several. Raises ApiError, ContractError.
    """
    model = models.find(body.get("model"))
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    if name in model.names:
        raise ApiError(400, f"lora_name is {name!r:.128}, the name of a model", "lora_name")
    await asyncio.to_thread(model.engine.connection.load_adapter, name, path, _LOAD_S)
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload_adapter(models: Models, body: Mapping[str, Any]) -> str:
    """Discard `lora_name`; return what was done. Raises ApiError, ContractError."""
    name = _text(body, "lora_name")
    model = models.find(body.get("model") or name)
    await asyncio.to_thread(model.engine.connection.unload_adapter, name, _UNLOAD_S)
    return f"Success: LoRA adapter '{name}' removed successfully."
