"""Read from a `config.json` which blocks of tokens heads skip (Phi-3-small). No torch."""

from slipstream.layers.dims import SkipConfig
from slipstream.models.reader import Reader, words

KEYS = words(
    "blocksparse_homo_head_pattern blocksparse_block_size blocksparse_num_local_blocks "
    "blocksparse_vert_stride dense_attention_every_n_layers"
)


def read_skips(config: Reader) -> SkipConfig | None:
    """Read which blocks heads skip in all but every n-th layer; None: no head skips any.

    A head sees block k of the older ones if the stride divides `k + 1`, and beyond that its number
    times a step, unless all heads see the same.
    """
    heads, layers = config.whole("num_attention_heads"), config.whole("num_hidden_layers")
    stride, every = config.whole("blocksparse_vert_stride"), layers + 1
    if config.has("dense_attention_every_n_layers"):
        every = config.whole("dense_attention_every_n_layers")
    skipping = frozenset(i for i in range(layers) if (i + 1) % every)
    if stride == 1 or not skipping:
        return None
    are_alike = config.flag("blocksparse_homo_head_pattern", default=False)
    step = 0 if are_alike else max(1, stride // heads)
    return SkipConfig(
        layers=skipping,
        tokens=config.whole("blocksparse_block_size"),
        local=config.whole("blocksparse_num_local_blocks"),
        stride=stride,
        firsts=tuple((-1 - i * step) % stride for i in range(heads)),
    )
