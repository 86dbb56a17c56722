"""The attention that a model and its configuration need: known before weights are read."""

from dataclasses import dataclass

import torch

from slipstream.kernels.attention.rules import CAPPED, PLAIN, SINKING, SLOPED, Case

CAUSAL = "causal"
# Other forms, that no backend has yet; docs/attention.md says so of each.
MISSING_FORMS = ("cross",)
LATENT = "latent (MLA)"  # latent.py
# A row for each head of a row, of a cache whose blocks are a kv head's: what a head does not see is
# not in its table.
BY_HEAD = "by head"
PREFIX = "prefix"  # causal but for prompts, whose tokens see each other: a row for each of them


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a model on one device.

    Attention is grouped-query: `num_heads` of queries read `num_kv_heads` of K and V, all of
    `head_size` numbers. A sequence that streams keeps its first `num_sinks` tokens and the newest
    of `stream_window` tokens in all. Of the latent form, the cache has one head, and a row of it is
    two of its heads: `latent_rank` numbers, of which keys and values are made, then a key.
    """

    device: str  # cuda | cpu
    dtype: torch.dtype  # of queries, keys and values
    cache_dtype: torch.dtype  # kv_format.py
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    windows: tuple[int, ...] = (0,)  # of the layers, each once: tokens that a query sees; 0: all
    is_chunked: bool = False  # a window is of the chunk that a query is in; see layers/chunked.py
    stream_window: int = 0  # `attention_window`; 0: no sequence streams
    num_sinks: int = 0
    deterministic: bool = False  # a sequence's bits do not depend on others
    reuses_blocks: bool = True  # `kv_cache_reuse`
    host_bytes: int = 0  # `kv_cache_host_bytes`
    layers_per_block: int = 1  # core/groups.py
    form: str = CAUSAL
    latent_rank: int = 0  # of the latent form
    skipped_tokens: int = 0  # of a block that heads of some layers may skip; 0: they see all
    score_cap: float = 0.0  # scores.py; 0: none
    has_slopes: bool = False
    has_sink_scores: bool = False
    model: str = "the model"  # as messages name it

    @property
    def streams(self) -> bool:
        """Whether sequences have no end, and release what lies outside their window."""
        return self.stream_window > 0

    @property
    def changes(self) -> tuple[str, ...]:
        """How scores are changed, by the names of rules.py."""
        made = {CAPPED: self.score_cap, SLOPED: self.has_slopes, SINKING: self.has_sink_scores}
        return tuple(name for name, is_made in made.items() if is_made)

    def case(self, window: int = 0) -> Case:
        """Return what chooses the kernels of layers with this window.

        Layers that see chunks have the kernels of full attention.
        """
        has_window = (window > 0 and not self.is_chunked) or self.streams
        what = (self.dtype, self.cache_dtype, self.head_size, has_window, self.streams)
        return Case(*what, (*self.changes, PLAIN)[0])
