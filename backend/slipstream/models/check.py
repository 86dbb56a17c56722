"""Whether a checkpoint's files hold what its config.json asks for, before anybody serves it."""

from pathlib import Path


def check_tensors(directory: Path) -> None:
    """Compare names, shapes and types of all tensors; reads no weights, but imports torch.

    Raises CheckpointError for the first that is missing, misshapen or left over.
    """
    import torch

    from slipstream.models.decoder import build
    from slipstream.models.hf import read_config
    from slipstream.models.weights import ShapeSource, Weights

    # Built where tensors have shapes and no numbers, by the code that loads it for good.
    config = read_config(directory)
    source = ShapeSource(directory, config.tensors)
    build(config, Weights(source, torch.device("meta"), torch.float32), max_model_len=1)
