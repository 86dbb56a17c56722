"""Check that a checkpoint's tensors match its config.json, before it is served."""

from pathlib import Path

from slipstream.models.model_config import ModelConfig


def check_tensors(directory: Path, config: ModelConfig | None = None) -> None:
    """Check names, shapes and dtypes of all tensors. Reads no weights, but imports torch.

    `config` is what was read of config.json; None: it is read here.

    Raises CheckpointError for the first tensor that is missing, left over or of a wrong shape.
    """
    import torch

    from slipstream.models.decoder import build_any
    from slipstream.models.hf import read_config
    from slipstream.models.source import Weights
    from slipstream.models.weights import ShapeSource

    # Build on the device `meta`, where tensors have no data, with the code that loads a model.
    config = config or read_config(directory)
    source = ShapeSource(directory, config.tensors)
    build_any(config, Weights(source, torch.device("meta"), torch.float32), max_model_len=1)
