"""Models whose heads skip blocks of tokens: the sizes that a GPU's kernels have rows for."""

from slipstream.errors import ConfigError
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.layers.dims import SkipConfig

_MOST_ROWS = (1 << 16) - 1  # of a launch, whose grid has one along z for each


def check_skips(
    skips: SkipConfig | None, spec: AttentionSpec, num_seqs: int, num_rows: int, num_tokens: int
) -> None:
    """Raise `ConfigError` if heads of a step are more rows than a launch on a GPU can have.

    The largest step has `num_tokens` in `num_rows`, of which `max_num_seqs = num_seqs` makes most.
    """
    if skips is None or spec.device == "cpu" or not spec.skipped_tokens:
        return
    # A chunk has queries in as many blocks as it fills, and in two more, which it does not.
    most = (_MOST_ROWS // spec.num_heads - num_tokens // skips.tokens) // 2
    if num_rows > most:
        raise ConfigError(
            f"max_num_seqs = {num_seqs} and max_num_batched_tokens = {num_tokens} make a step of "
            f"{num_rows} rows: {spec.model}, whose {spec.num_heads} heads skip blocks of "
            f"{skips.tokens} tokens, has at most {max(0, most)} beside so many tokens on a GPU"
        )
