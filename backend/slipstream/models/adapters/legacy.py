"""Read an adapter of TensorRT-LLM's inputs; see `slipstream_contract.lora`.

Ids of modules are those of its converter: 5 is Hugging Face's `gate_proj` and 7 `up_proj`, and a
fused `gate_up_proj` is 5 with the outputs of `up_proj` first.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from slipstream_contract.lora import COLUMNS, CONFIG, WEIGHTS, LoraTask
from slipstream_contract.prompt_table import TABLE, PromptTable
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.models.adapters.config import MAX_RANK
from slipstream.models.adapters.read import AdapterWeights, RankTerms, check_range, of_table
from slipstream.models.adapters.targets import Part, Targets

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MODULES: dict[int, tuple[str, ...]] = {
    0: _QKV,
    1: _QKV[:1],
    2: _QKV[1:2],
    3: _QKV[2:],
    4: ("self_attn.o_proj",),
    5: ("mlp.gate_proj",),
    6: ("mlp.down_proj",),
    7: ("mlp.up_proj",),
}
_GATE_AND_UP = ("mlp.up_proj", "mlp.gate_proj")  # of a fused module 5


class Row(NamedTuple):
    """A module of a layer."""

    number: int
    module: int
    layer: int
    rank: int
    numbers: Tensor  # [width] f16

    def refusal(self, why: str) -> CheckpointError:
        """Return the error that says why the row is refused."""
        return CheckpointError(
            f"{CONFIG}[{self.number}] is module {self.module} of layer {self.layer} with rank "
            f"{self.rank}: {why}"
        )


def read_task(task: LoraTask, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read and check the weights of a task; raises `CheckpointError` (row, value)."""
    terms: dict[str, list[Term]] = {}
    of_ranks = RankTerms(targets)
    digest = blake2b(b"task", digest_size=16)
    rank = 0
    for row in rows_of(task):
        rank = max(rank, row.rank)
        parts = parts_of(row, targets)
        a, b = cut(row, parts)
        begin = 0
        for part in parts:
            own = b[begin : begin + part.outputs]
            begin += part.outputs
            term = Term(part.first, a.to(dtype), own.to(dtype).contiguous())
            if any(each.first == part.first for each in terms.get(part.place, ())):
                raise row.refusal("a row before it has that module, too")
            terms.setdefault(part.place, []).append(term)
            of_ranks.add(part, term)
    check_range(terms, dtype, WEIGHTS)
    for place, found in sorted(terms.items()):
        for term in sorted(found, key=lambda each: each.first):
            digest.update(f"{place} {term.first} {len(term.b)} ".encode())
            for x in (term.a, term.b):
                assert x is not None, "rows have both"
                digest.update(f"{tuple(x.shape)} ".encode())
                digest.update(x.contiguous().view(torch.uint8).numpy().data)
    return of_ranks.weights(digest.digest(), rank)


def read_table(table: PromptTable, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read and check the embeddings of a request; raises `CheckpointError`."""
    array = np.frombuffer(table.rows, np.float16).reshape(table.num_rows, table.width)
    tag = np.array(table.extra_ids, np.uint64).tobytes()
    return of_table(torch.from_numpy(array.copy()), targets, dtype, TABLE, tag)


def rows_of(task: LoraTask) -> Iterator[Row]:
    """Yield the rows of a task; raises `CheckpointError`."""
    config = np.frombuffer(task.config, np.int32).reshape(task.num_rows, COLUMNS)
    array = np.frombuffer(task.weights, np.float16).reshape(task.num_rows, task.width)
    weights = torch.from_numpy(array.copy())
    for number, (module, layer, rank) in enumerate(config.tolist()):
        row = Row(number, module, layer, rank, weights[number])
        if not 1 <= rank <= MAX_RANK:
            raise row.refusal(f"ranks are from 1 to {MAX_RANK}")
        yield row


def parts_of(row: Row, targets: Targets) -> Sequence[Part]:
    """Return the parts of a row, in the order of its outputs."""
    names = MODULES.get(row.module)
    if names is None:
        raise row.refusal(f"modules are {', '.join(map(str, MODULES))}")
    if row.module == 5 and targets.of_decoder(row.layer, names[0]) is None:
        names = ("mlp.up_proj",)  # an MLP without a gate
    parts = [targets.of_decoder(row.layer, name) for name in names]
    found = [part for part in parts if part is not None]
    both = [targets.of_decoder(row.layer, name) for name in _GATE_AND_UP]
    up, gate = both
    if row.module == 5 and up is not None and gate is not None:
        used = row.rank * (up.inputs + up.outputs + gate.outputs)
        if len(row.numbers) >= used and row.numbers[used - row.rank : used].any():
            found, parts = [up, gate], [up, gate]  # more numbers than one matrix has
    if len(found) < len(parts):
        raise row.refusal("the model has no such matrix")
    if any(part.is_changed for part in found):
        raise row.refusal("the checkpoint's matrix is changed as it is loaded: not implemented")
    return found


def cut(row: Row, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Cut A and B out of a row; what is behind must be zeros."""
    inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
    middle, end = row.rank * inputs, row.rank * (inputs + outputs)
    if len(row.numbers) < end:
        raise row.refusal(
            f"A and B have {end} numbers ({inputs} inputs, {outputs} outputs), {WEIGHTS} has "
            f"{len(row.numbers)} in a row"
        )
    if row.numbers[end:].any():
        raise row.refusal(f"{WEIGHTS} has numbers behind the {end} of A and B")
    return row.numbers[:middle].view(row.rank, inputs), row.numbers[middle:end].view(-1, row.rank)
