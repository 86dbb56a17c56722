"""Read an adapter of TensorRT-LLM's inputs; see `slipstream_contract.lora`.

Ids of modules are those of its converter: 5 is Hugging Face's `gate_proj` and 7 `up_proj`, and a
fused `gate_up_proj` is 5 with the outputs of `up_proj` first.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from slipstream_contract.lora import COLUMNS, CONFIG, WEIGHTS, LoraTask
from slipstream_contract.prompt_table import TABLE, PromptTable
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.models.adapters.blocks import are_finite
from slipstream.models.adapters.config import MAX_RANK
from slipstream.models.adapters.read import AdapterWeights, RankTerms, check_range, of_table
from slipstream.models.adapters.targets import Part, Targets
from slipstream.models.adapters.workers import in_threads

_Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float16]]"
_PIECE = 8 << 20  # bytes of rows that are read together
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
    numbers: _Numbers  # [width]

    def refusal(self, why: str) -> CheckpointError:
        """Return the error that says why the row is refused."""
        return CheckpointError(
            f"{CONFIG}[{self.number}] is module {self.module} of layer {self.layer} with rank "
            f"{self.rank}: {why}"
        )


def read_task(task: LoraTask, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read and check the weights of a task, in pieces, by several threads.

    Raises `CheckpointError` (row, value).
    """
    terms: dict[str, list[Term]] = {}
    of_ranks = RankTerms(targets)
    digests: list[tuple[str, int, bytes]] = []
    rank, has_range = 0, True

    def made(rows: Sequence[Row]) -> _Made:
        return _made(rows, targets, dtype)

    with closing(in_threads(made, _pieces(rows_of(task)))) as pieces:
        for piece in pieces:
            has_range &= piece.are_finite
            for row, part, term, digest in piece.terms:
                rank = max(rank, row.rank)
                found = terms.setdefault(part.place, [])
                if any(each.first == part.first for each in found):
                    raise row.refusal("a row before it has that module, too")
                found.append(term)
                of_ranks.add(part, term)
                digests.append((part.place, part.first, digest))
            if piece.error is not None:
                raise piece.error
    if not has_range:
        check_range(terms, dtype, WEIGHTS)
    whole = blake2b(b"task", digest_size=16)
    for _, _, digest in sorted(digests):
        whole.update(digest)
    return of_ranks.weights(whole.digest(), rank)


class _Made(NamedTuple):
    """What a thread has made of rows, up to one that is wrong."""

    terms: list[tuple[Row, Part, Term, bytes]]  # with its digest
    are_finite: bool  # all numbers of the terms
    error: CheckpointError | None


def _pieces(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows that are read together."""
    piece: list[Row] = []
    for row in rows:
        piece.append(row)
        if len(piece) * row.numbers.nbytes >= _PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def _made(rows: Sequence[Row], targets: Targets, dtype: torch.dtype) -> _Made:
    """Make the terms of rows, whose numbers lie in one block of memory without zeros between."""
    found: list[tuple[Row, Sequence[Part], int]] = []  # and where its numbers end
    error, size = None, 0
    for row in rows:
        try:
            parts = parts_of(row, targets)
            size += end_of(row, parts)
        except CheckpointError as wrong:
            error = wrong
            break
        found.append((row, parts, size))
    halves, first = np.empty(size, np.float16), 0
    for row, _, end in found:
        halves[first:end] = row.numbers[: end - first]
        first = end
    block, first = torch.from_numpy(halves).to(dtype), 0
    terms = []
    for row, parts, end in found:
        sides = sides_of(block[first:end], row.rank, parts)
        terms += [
            (row, part, Term(part.first, a, b), _digest(part, a, b))
            for part, (a, b) in zip(parts, sides, strict=True)
        ]
        first = end
    return _Made(terms, not size or are_finite(block), error)


def _digest(part: Part, a: Tensor, b: Tensor) -> bytes:
    digest = blake2b(f"{part.place} {part.first} ".encode(), digest_size=16)
    for x in (a, b):
        digest.update(f"{tuple(x.shape)} ".encode())
        digest.update(x.view(torch.uint8).numpy().data)
    return digest.digest()


def read_table(table: PromptTable, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read and check the embeddings of a request; raises `CheckpointError`."""
    array = np.frombuffer(table.rows, np.float16).reshape(table.num_rows, table.width)
    tag = np.array(table.extra_ids, np.uint64).tobytes()
    return of_table(torch.from_numpy(array.copy()), targets, dtype, TABLE, tag)


def rows_of(task: LoraTask) -> Iterator[Row]:
    """Yield the rows of a task, as they are."""
    config = np.frombuffer(task.config, np.int32).reshape(task.num_rows, COLUMNS)
    weights = np.frombuffer(task.weights, np.float16).reshape(task.num_rows, task.width)
    for number, (module, layer, rank) in enumerate(config.tolist()):
        yield Row(number, module, layer, rank, weights[number])


def parts_of(row: Row, targets: Targets) -> Sequence[Part]:
    """Return the parts of a row, in the order of its outputs; raises `CheckpointError`."""
    if not 1 <= row.rank <= MAX_RANK:
        raise row.refusal(f"ranks are from 1 to {MAX_RANK}")
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


def end_of(row: Row, parts: Sequence[Part]) -> int:
    """Return how many numbers A and B have; what is behind must be zeros."""
    inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
    end = row.rank * (inputs + outputs)
    if len(row.numbers) < end:
        raise row.refusal(
            f"A and B have {end} numbers ({inputs} inputs, {outputs} outputs), {WEIGHTS} has "
            f"{len(row.numbers)} in a row"
        )
    behind = row.numbers[end:]
    # Integers are compared many at a time; a negative zero is one of the others.
    if behind.view(np.uint16).max(initial=0) and behind.any():
        raise row.refusal(f"{WEIGHTS} has numbers behind the {end} of A and B")
    return end


def sides_of(numbers: Tensor, rank: int, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
    """Return A and B of each part, of the numbers of a row."""
    inputs = parts[0].inputs
    a, b = numbers[: rank * inputs].view(rank, inputs), numbers[rank * inputs :].view(-1, rank)
    ends = accumulate(part.outputs for part in parts)
    return [(a, b[end - part.outputs : end]) for part, end in zip(parts, ends, strict=True)]
