"""The resolution of a drafter that runs on the device, beside the model: checked before weights."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from slipstream_contract.limits import MAX_DRAFT_TOKENS

from slipstream.config import DEVICE_DRAFTERS, EngineConfig
from slipstream.core.groups import LayerGroups
from slipstream.drafting.synthetic import rates_of
from slipstream.errors import ConfigError
from slipstream.kernels.attention.backend import AttentionBackend, backend_for
from slipstream.kernels.cache import kv_format
from slipstream.models.drafts.choices import chain_length
from slipstream.models.drafts.eagle3 import Eagle3Config, read_eagle3
from slipstream.models.drafts.medusa import MedusaConfig, read_medusa
from slipstream.models.drafts.tokens import check_same_tokens
from slipstream.models.hf import read_config
from slipstream.models.model_config import ModelConfig
from slipstream.runner.cache_dtype import attention_spec, model_on


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter's resolved facts. One of `model`, `medusa` and `eagle3` is not None."""

    name: str  # one of `DEVICE_DRAFTERS`
    checkpoint: Path
    num_drafts: int  # the longest chain
    model: ModelConfig | None = None
    medusa: MedusaConfig | None = None
    eagle3: Eagle3Config | None = None
    attention: AttentionBackend | None = None  # None: it caches nothing
    state_bytes: int = 0  # of a token, cached beside keys and values

    @property
    def block_bytes(self) -> int:
        """Bytes that a block of the cache has for the drafter."""
        if self.attention is None:
            return 0
        spec = self.attention.spec
        return self.attention.kv_spec.block_bytes + spec.block_size * self.state_bytes


def _num_drafts(config: EngineConfig) -> int:
    """Return how many drafts a chain has, from `num_draft_tokens` and the choices."""
    count, field = config.num_draft_tokens, "num_draft_tokens"
    for name, drafter in (("medusa_choices", "medusa"), ("eagle_choices", "eagle3")):
        text = getattr(config, name)
        if not text:
            continue
        if config.speculation != drafter:
            raise ConfigError(f"{name} needs speculation = {drafter}")
        count, field = chain_length(name, text), name
    if not 1 <= count <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"{field} asks for {count} drafts, not 1 to {MAX_DRAFT_TOKENS}")
    return count


def _check_synthetic(config: EngineConfig) -> None:
    """Raise `ConfigError` for rates that are wrong, missing or of no effect."""
    rates = config.synthetic_acceptance
    if config.speculation != "synthetic":
        if rates:
            raise ConfigError("synthetic_acceptance needs speculation = synthetic")
        return
    if not rates:
        raise ConfigError("speculation = synthetic needs synthetic_acceptance, such as 0.8,0.7")
    rates_of(rates)
    if config.deterministic:
        raise ConfigError(
            "speculation = synthetic changes texts, so it does not go with deterministic = true"
        )


def _attention(
    config: EngineConfig,
    target: AttentionBackend,
    groups: LayerGroups,
    model: ModelConfig,
) -> AttentionBackend:
    """Return the backend of a drafter's layers, which lie in the blocks of full attention.

    What it says never changes a token, so its bits may depend on what else is in a step.
    """
    name, spec = config.speculation, target.spec
    if config.attention_window is not None:
        raise ConfigError(
            f"speculation = {name} does not go with attention_window: its keys and values lie "
            "where the target's do, and are not moved with the window"
        )
    if min(spec.windows) and (groups.num_tables == 1 or groups.num_full == 0):
        raise ConfigError(
            f"speculation = {name} needs a layer of full attention: all of the target's have a "
            f"window of {max(spec.windows)} tokens, outside which blocks are freed"
        )
    if model.axes.skips is not None:
        raise ConfigError(
            f"speculation = {name} does not go with a draft_checkpoint of {model.architecture}: "
            f"its heads skip blocks of {model.axes.skips.tokens} tokens"
        )
    is_quantized = spec.cache_dtype in kv_format.FORMATS.values()
    cached = spec.cache_dtype if is_quantized else spec.dtype
    device = torch.device(spec.device)
    asked = attention_spec(config, model, device, spec.dtype, cached, model.dims.num_layers)
    asked = replace(asked, deterministic=False)
    backend = backend_for(asked)
    if isinstance(backend, str):
        raise ConfigError(f"speculation = {name}: {backend}")
    return backend(asked)


def plan_drafts(
    config: EngineConfig,
    target: ModelConfig,
    attention: AttentionBackend,
    groups: LayerGroups,
    max_tokens: int,
) -> DraftPlan | None:
    """Check the drafter that the configuration names for this target; None: none on the device.

    `max_tokens` is the length of the longest sequence. Raises `ConfigError` (field, value, limit)
    or `CheckpointError` (file, key, value).
    """
    name = config.speculation
    _check_synthetic(config)
    if name not in DEVICE_DRAFTERS:
        if config.draft_checkpoint:
            names = ", ".join(DEVICE_DRAFTERS)
            raise ConfigError(f"draft_checkpoint needs a speculation that reads it: {names}")
        _num_drafts(config)
        return None
    if not config.draft_checkpoint:
        raise ConfigError(f"speculation = {name} needs a draft_checkpoint")
    directory, count = Path(config.draft_checkpoint), _num_drafts(config)
    if not directory.is_dir():
        raise ConfigError(f"draft_checkpoint = {str(directory)[:200]!r}: no such directory")
    if name == "medusa":
        return _medusa(config, target, directory, count)
    if name == "eagle3":
        eagle3 = read_eagle3(directory, target, config.load_format == "random")
        own = _attention(config, attention, groups, eagle3.model)
        state_bytes = target.dims.hidden_size * attention.spec.dtype.itemsize
        return DraftPlan(
            name, directory, count, eagle3=eagle3, attention=own, state_bytes=state_bytes
        )
    check_same_tokens(Path(config.checkpoint), directory)
    model = model_on(attention.spec.device, read_config(directory)).of_length(max_tokens)
    if model.axes.chunked:
        raise ConfigError(
            f"draft_checkpoint: {model.architecture} sees chunks of {max(model.windows)} tokens, "
            f"which drafters do not have: max_model_len = {max_tokens} is above that"
        )
    vocab_size = target.dims.vocab_size
    if model.dims.vocab_size != vocab_size and not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"draft_checkpoint: vocab_size = {model.dims.vocab_size} is not the target's "
            f"{vocab_size}, and no tokenizer says that the tokens are the same"
        )
    own = _attention(config, attention, groups, model)
    return DraftPlan(name, directory, count, model=model, attention=own)


def _medusa(config: EngineConfig, target: ModelConfig, directory: Path, count: int) -> DraftPlan:
    d = target.dims
    medusa = read_medusa(directory, d.hidden_size, d.vocab_size)
    if config.medusa_choices and count > medusa.num_heads:
        raise ConfigError(
            f"medusa_choices asks for {count} drafts, but medusa_num_heads = {medusa.num_heads}"
        )
    count = min(count, medusa.num_heads)  # `num_draft_tokens` is the most
    return DraftPlan("medusa", directory, count, medusa=medusa)
