"""Copy a checkpoint or an adapter, pickles as safetensors of the same names, dtypes and bits."""

from pathlib import Path

from slipstream.errors import CheckpointError
from slipstream.models.adapters.read import FILE
from slipstream.models.files import INDEX, SINGLE

from slipstream_convert.pickles import ADAPTER, pickled_files, shards
from slipstream_convert.writer import SHARD_BYTES, Writer


def convert(checkpoint: Path, output: Path, shard_bytes: int = SHARD_BYTES) -> tuple[int, int]:
    """Write the copy; return its tensors and their bytes. `output` is made at the very end.

    Raises `CheckpointError` for what is wrong with the checkpoint, `ConfigError` for an output that
    exists. An adapter's copy is one file.
    """
    for name in (SINGLE, INDEX, FILE):
        if (checkpoint / name).is_file():
            raise CheckpointError(f"{checkpoint / name}: the weights are safetensors already")
    is_adapter = [path.name for path in pickled_files(checkpoint)] == [ADAPTER]
    writer = Writer(output, 1 << 62, FILE) if is_adapter else Writer(output, shard_bytes)
    try:
        count = 0
        for tensors in shards(checkpoint):
            writer.add(tensors)
            count += len(tensors)
        writer.finish(checkpoint, {})
    finally:
        writer.discard()
    return count, writer.num_bytes
