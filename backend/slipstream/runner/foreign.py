"""Settings that a class of transformers cannot be served with, each with its reason."""

from collections.abc import Callable

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.model_config import ModelConfig

_Is = Callable[[object], bool]
# Field, whether its value can be had, and why others cannot.
_LIMITS: tuple[tuple[str, _Is, str], ...] = (
    (
        "quantization",
        lambda value: value in ("auto", "none"),
        "its matrices are transformers' own",
    ),
    (
        "deterministic",
        lambda value: value is False,
        "its products may depend on the rows beside a row",
    ),
    ("attention_window", lambda value: value is None, "its class has rotated what is cached"),
    (
        "speculation",
        lambda value: value not in ("medusa", "eagle3"),
        "its class does not show states between layers",
    ),
)


def check_foreign(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if the model is a class of transformers and a setting needs a family."""
    if model.build is None:
        return
    for field, can_be, why in _LIMITS:
        value = getattr(config, field)
        if not can_be(value):
            raise ConfigError(
                f"{field} = {value!r} does not go with backend_model = {config.backend_model!r} "
                f"for {model.architecture}: {why}"
            )
