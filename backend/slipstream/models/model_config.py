"""A checkpoint's configuration after reading. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.axes import Axes, TensorNames

if TYPE_CHECKING:
    from slipstream.layers.decoder import StepDecoder


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that the decoder is built from."""

    architecture: str
    dims: Dims
    axes: Axes
    tensors: TensorNames
    ropes: tuple[RopeConfig, ...]  # of each layer
    # Tokens that a query of each layer sees at most, with its own; 0: all.
    windows: tuple[int, ...]
    max_positions: int
    ties_embeddings: bool
    dtype: str | None  # as config.json says, if it does
    eos_ids: tuple[int, ...]
    fp8_cache: bool  # whether the checkpoint wants its cache in e4m3
    ignored: tuple[str, ...]  # keys of config.json that change nothing, here or in transformers
    # Makes a decoder that is no family's, of `(config, weights, max_model_len)`.
    build: "Callable[[ModelConfig, Any, int], StepDecoder] | None" = field(
        default=None, compare=False
    )

    # Names of a Hugging Face directory of the model, where `tensors` are those of a GGUF file.
    published: TensorNames | None = None
    is_text_alone: bool = False  # of a checkpoint that sees images, too
    num_ranks: int = 1  # over which it is split; sizes are a rank's, but for the vocabulary
    stage: int = 0  # of a pipeline: which has these layers
    num_stages: int = 1
    whole: "ModelConfig | None" = None  # of all stages together; None: this has all layers
    stage_bounds: tuple[tuple[int, int], ...] = ()  # of each stage, the first layer and the end

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the head, that a rank has."""
        return -(-self.dims.vocab_size // self.num_ranks)

    @property
    def all_windows(self) -> tuple[int, ...]:
        """Windows of the layers of all stages."""
        return (self.whole or self).windows

    def of_length(self, max_tokens: int) -> "ModelConfig":
        """Return the model for sequences of so many tokens.

        Where a chunk of attention holds them all, layers that see their chunk see everything.
        """
        if not self.axes.chunked or max_tokens > max(self.windows):
            return self
        axes = replace(self.axes, chunked=False)
        return replace(self, axes=axes, windows=(0,) * len(self.windows))

    @property
    def rope(self) -> RopeConfig:
        """The rotation of the first layer: of all, where sequences stream."""
        return self.ropes[0]
