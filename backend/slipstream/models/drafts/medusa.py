"""Medusa heads (Cai et al., 2024): the tokens behind the next one, from the model's last state.

A head is residual blocks `x + silu(W x + b)` and an output layer. The file is
`medusa_lm_head.safetensors`, with tensors `HEAD.BLOCK.linear.weight`, `.bias` and
`HEAD.BLOCKS.weight`; heads without an output layer of their own use the model's.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from slipstream import quant
from slipstream.errors import CheckpointError
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.embedding import Head
from slipstream.layers.linear import Linear
from slipstream.models.axes import TensorNames
from slipstream.models.files import read_json
from slipstream.models.reader import Reader
from slipstream.models.source import Weights

FILE = "medusa_lm_head.safetensors"
NAMES = TensorNames()
_MOST_HEADS, _MOST_BLOCKS = 64, 16


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What config.json says of Medusa heads."""

    num_heads: int
    num_blocks: int  # of each


def read_medusa(directory: Path, hidden_size: int, vocab_size: int) -> MedusaConfig:
    """Read config.json of Medusa heads for a model of these sizes; raises `CheckpointError`."""
    path = directory / "config.json"
    config = Reader(read_json(path), str(path))
    if not config.has("medusa_num_heads"):
        raise CheckpointError(f"{path}: medusa_num_heads is missing: no Medusa heads")
    for key, wanted in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.has(key) and config.whole(key) != wanted:
            raise config.refusal(key, f"is not the target's, {wanted}")
    return MedusaConfig(
        config.whole("medusa_num_heads", most=_MOST_HEADS),
        config.whole("medusa_num_layers", 1, _MOST_BLOCKS),
    )


class MedusaHeads:
    """The heads of a model with states of `hidden_size` and logits of `vocab_size`.

    Args:
        w: their weights.
        config: their numbers.
        hidden_size, vocab_size: of the model.
        output: the model's output layer, `[vocab, hidden]`, packed if the model has it so.
    """

    def __init__(
        self, w: Weights, config: MedusaConfig, hidden_size: int, vocab_size: int, output: Matrix
    ) -> None:
        sizes = ((hidden_size,), hidden_size)
        shared = Linear(quant.named("none"), output)
        self._blocks: list[list[Linear]] = []
        self._outputs: list[Linear] = []
        last = str(config.num_blocks)
        for number in range(config.num_heads):
            head = w.at(str(number))
            names = [f"{block}.linear" for block in range(config.num_blocks)]
            self._blocks.append([Linear.read(head, (name,), *sizes, bias=True) for name in names])
            own = shared
            if head.has(f"{last}.weight"):
                own = Linear.read(head, (last,), (vocab_size,), hidden_size)
            self._outputs.append(own)

    def logits(self, number: int, states: Tensor) -> Tensor:
        """Logits `[n, vocab]` of head `number`, from the model's last states behind its norm."""
        for block in self._blocks[number]:
            states = states + functional.silu(block(states))
        return self._outputs[number](states)


def load_medusa(w: Weights, config: MedusaConfig, head: Head) -> MedusaHeads:
    """Build the heads for a model with this head, and end the reading.

    Raises `CheckpointError` if a tensor is missing, wrong or left over.
    """
    vocab_size, hidden_size = head.table.shape
    heads = MedusaHeads(w, config, hidden_size, vocab_size, head.matrix)
    w.finish()
    return heads
