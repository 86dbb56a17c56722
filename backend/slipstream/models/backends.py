"""Choose what makes a checkpoint's decoder: a family of Slipstream's, or transformers' class."""

from importlib.util import find_spec
from pathlib import Path

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.hf import UnknownArchitectureError, read_config
from slipstream.models.model_config import ModelConfig

_HINT = "with --backend-model transformers, some that transformers has are served, more slowly"


def read_checkpoint(directory: Path, backend_model: str) -> ModelConfig:
    """Read config.json for one of `config.BACKEND_MODELS`; auto: transformers' where we have none.

    Raises `CheckpointError` (file, key, value), or `ConfigError` without the package transformers.
    """
    if backend_model != "transformers":
        try:
            return read_config(directory)
        except UnknownArchitectureError as error:
            if backend_model == "slipstream":
                raise CheckpointError(f"{error}; {_HINT}") from None
    if find_spec("transformers") is None:
        raise ConfigError(
            f"backend_model = {backend_model!r} needs a package: "
            "pip install 'slipstream[transformers]'"
        )
    from slipstream.models.foreign.reading import read_foreign  # imports transformers: seconds

    return read_foreign(directory)


def notes(config: ModelConfig) -> str:
    """Return a line for the start, of what serves the model; empty if a family does."""
    if config.build is None:
        return ""
    return (
        f"{config.architecture} runs as transformers' own class, with paged attention: slower than "
        "a family of Slipstream's, and without CUDA graphs"
    )
