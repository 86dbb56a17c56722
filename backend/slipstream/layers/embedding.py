"""Token embedding, and the same matrix (or its own) as the head that gives logits."""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slipstream import quant
from slipstream.errors import CheckpointError
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.dims import Dims
from slipstream.layers.linear import Linear, NormLinear
from slipstream.layers.norm import RowNorm, identity
from slipstream.layers.packed_rows import PackedRows
from slipstream.layers.residual import Residual
from slipstream.layers.source import Stored, WeightSource
from slipstream.quant.forms import (
    as_rows,
    form_of_ends,
    make_tiles,
    packs_ends,
    read_numbers,
    takes_tiles,
)
from slipstream.quant.matrix import write

_log = logging.getLogger(__name__)
_HALVES = (torch.bfloat16, torch.float16)
_EMBEDDING = "model.embed_tokens"
_PART = 4096  # rows of a table that are looked up together


class Ends(NamedTuple):
    """What stands around the two matrices at a decoder's ends; neutral by default.

    scale: of rows of the embedding.
    position_rows, position_offset: of the table of learned positions, whose row `position +
    position_offset` is added to a token's; 0 rows: no table.
    head_bias: whether logits have a bias.
    logit_scale: of logits.
    logit_cap: logits are at most so large, by tanh; 0: no cap.
    width: numbers of a row of both, of which `project_in` makes the hidden size, and `project_out`
    them of it; 0: the hidden size.
    silent: token ids whose logits are the least number.
    """

    scale: float = 1.0
    position_rows: int = 0
    position_offset: int = 0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    width: int = 0
    silent: tuple[int, ...] = ()


PLAIN = Ends()


class Table:
    """Rows by token id: a tensor, or what is in fewer bits, of which rows are looked up.

    `weight` is all of it: of fewer bits it is made when it is first asked for, and kept. `parts`
    are some rows at a time, and not kept.
    """

    def __init__(self, source: Tensor | Stored) -> None:
        self._source = source
        self.shape = (source.shape[0], source.shape[1])  # tokens, and the numbers of a row
        self.dtype = source.dtype

    @functools.cached_property
    def weight(self) -> Tensor:
        """`[vocab, hidden]`."""
        return self._source if isinstance(self._source, Tensor) else self._source.whole()

    def rows(self, token_ids: Tensor) -> Tensor:
        """`[n] i64 -> [n, hidden]`."""
        if isinstance(self._source, Tensor):
            return functional.embedding(token_ids, self._source)
        return self._source(token_ids)

    def parts(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows after another, `[n, hidden]`, and which these are.

        `device` is that of the rows.
        """
        for first in range(0, self.shape[0], _PART):
            here = slice(first, min(first + _PART, self.shape[0]))
            yield here, self.rows(torch.arange(here.start, here.stop, device=device))


class VirtualTokens(Protocol):
    """Rows for token ids behind the vocabulary, which no scale changes."""

    def without(self, token_ids: Tensor) -> Tensor:
        """Return the ids `[n] i64` with others, of the vocabulary, in place of such."""

    def __call__(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows `[n, width]` of ids, those of virtual tokens replaced."""


class Embedding:
    """A row for each token id, times a scale, which is rounded as the weights are; then a row for
    its position, and a norm, where there are such.
    """

    def __init__(
        self,
        table: Table,
        scale: float = 1.0,
        positions: Tensor | None = None,
        norm: RowNorm | None = None,
        project: Linear | None = None,
    ) -> None:
        self.table = table
        self._project = project  # `[n, width] -> [n, hidden]`
        self.own: Callable[[Tensor], Tensor] = table.rows  # of the table that is here
        self.lookup: Callable[[Tensor], Tensor] = lambda token_ids: self.own(token_ids)
        self._scale = float(torch.tensor(scale, dtype=table.dtype))
        self._positions = positions
        self._norm = norm
        self.virtual: VirtualTokens | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`[n] i64`, of tokens and of their positions, `-> [n, hidden]`."""
        real = token_ids if self.virtual is None else self.virtual.without(token_ids)
        rows = self.lookup(real)
        if self._scale != 1.0:
            rows = rows * self._scale
        if self.virtual is not None:  # as wide as the table's rows
            rows = self.virtual(token_ids, rows)
        if self._project is not None:
            rows = self._project(rows)
        if self._positions is not None:
            rows = rows + functional.embedding(positions, self._positions)
        return rows if self._norm is None else self._norm(rows)


class Head:
    """Logits of every token id: `table [vocab, hidden]`.

    A bias is added to the product; then come a scale and a cap. `matrix` is what the product reads:
    the same weights as the checkpoint has them, in fewer bits, where a GEMM takes them so.
    """

    def __init__(
        self,
        table: Table,
        is_sliced: bool,
        bias: Tensor | None = None,
        ends: Ends = PLAIN,
        matrix: Matrix | None = None,
        project: Linear | None = None,
    ) -> None:
        self.table = table
        self._project = project  # `[n, hidden] -> [n, width]`
        self.matrix = Matrix(table.weight) if matrix is None else matrix
        self.product = NormLinear(Linear(quant.named("none"), self.matrix, bias, is_sliced))
        self._scale, self._cap = ends.logit_scale, ends.logit_cap
        self.silent: Tensor | None = None  # [k] i64
        if ends.silent:
            self.silent = torch.tensor(ends.silent, device=self.matrix.values.device)

    def __call__(self, norm: RowNorm, residual: Residual) -> Tensor:
        """Logits of `norm(residual)`, `[n, hidden] -> [n, vocab]`."""
        if self._project is not None:
            residual, norm = Residual(self._project(norm(residual.values))), identity
        logits, _ = self.product(norm, residual)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap:
            logits = ((logits.float() / self._cap).tanh() * self._cap).to(logits.dtype)
        return silenced(logits, self.silent)


def silenced(logits: Tensor, silent: Tensor | None) -> Tensor:
    """Give the logits `[n, vocab]` of tokens `[k] i64` the least number of their dtype, in place.

    None: no token is silent.
    """
    if silent is None:
        return logits
    return logits.index_fill_(1, silent, torch.finfo(logits.dtype).min)


def embedding_and_head(
    w: WeightSource,
    dims: Dims,
    is_tied: bool,
    ends: Ends = PLAIN,
    norm: RowNorm | None = None,
) -> tuple[Embedding, Head]:
    """The embedding, `model.embed_tokens`, and the head, `lm_head`; `norm` is the embedding's.

    Learned positions are `model.embed_positions`.

    Tied, they are one matrix, which the checkpoint may have under either name or under both. Where
    it has two that differ, they are not tied, whatever config.json says, as in transformers 5.
    """
    positions = _positions(w, dims, ends)
    into, out_of = _projections(w, dims, ends)
    dims = replace(dims, hidden_size=ends.width or dims.hidden_size)
    below, above = w.at(_EMBEDDING), w.at("lm_head")
    if is_tied and w.is_quantised("lm_head"):
        raise CheckpointError(
            "config.json: tie_word_embeddings = true, said or by default, but lm_head has "
            "quantised tensors of its own"
        )
    is_one = is_tied and not (below.has("weight") and above.has("weight"))
    bias = above.tensor("bias", dims.vocab_size) if ends.head_bias else None
    name = "lm_head" if is_one and above.has("weight") else _EMBEDDING
    matrix = _packed_embedding(w, name, dims, is_one) if is_one or not is_tied else None
    kept = matrix
    if is_one and matrix is None:
        matrix = _as_stored(w, name, dims)
    table = _table(w, name, dims, kept, is_multiplied=is_tied and matrix is None)
    embedding = Embedding(table, ends.scale, positions, norm, into)
    if is_one:
        return embedding, _head(w, table, bias, ends, matrix, out_of)
    matrix = _packed(w, "lm_head", dims, "the head's weights")
    matrix = matrix if matrix is not None else _as_stored(w, "lm_head", dims)
    if matrix is not None and not is_tied:
        own = Table(PackedRows(matrix, w.dtype))
        return embedding, _head(w, own, bias, ends, matrix, out_of)
    weight = _head_weight(w, above, dims, matrix is None)
    # Where only shapes are checked there are no numbers to compare.
    if is_tied and (weight.is_meta or torch.equal(weight, table.weight)):
        return embedding, _head(w, table, bias, ends, matrix, out_of)
    if is_tied:
        _log.warning(
            "config.json: tie_word_embeddings = true, said or by default, but lm_head.weight "
            "differs from model.embed_tokens.weight: each is used as it is"
        )
    return embedding, _head(w, Table(weight), bias, ends, matrix, out_of)


def _head(
    w: WeightSource,
    table: Table,
    bias: Tensor | None,
    ends: Ends,
    matrix: Matrix | None,
    project: Linear | None,
) -> Head:
    """Return a head; the CPU kernels multiply with a table of fp32 as it lies."""
    if matrix is None and w.quantization != "none":
        matrix = as_rows(table.weight, w.target)
    return Head(table, w.deterministic, bias, ends, matrix, project)


def _projections(w: WeightSource, dims: Dims, ends: Ends) -> tuple[Linear | None, Linear | None]:
    """Read the matrices between the hidden size and that of both ends, where these differ."""
    if not ends.width:
        return None, None
    model, hidden = w.at("model"), dims.hidden_size
    into = Linear.read(model, ("project_in",), (hidden,), ends.width)
    return into, Linear.read(model, ("project_out",), (ends.width,), hidden)


def _table(
    w: WeightSource, name: str, dims: Dims, packed: Matrix | None, is_multiplied: bool
) -> Table:
    """Return the embedding: packed, or as the file has it, unless all of it is multiplied as
    numbers.
    """
    if packed is not None:
        return Table(PackedRows(packed, w.dtype))
    sizes = (dims.vocab_size, dims.hidden_size)
    stored = None if is_multiplied else w.stored_rows(name, *sizes)
    if stored is None:
        return Table(w.at(name).tensor("weight", *sizes))
    w.note("the embedding: rows are dequantised when they are looked up")
    return Table(stored)


def _packed_embedding(w: WeightSource, name: str, dims: Dims, is_head: bool) -> Matrix | None:
    """Read the embedding, which may be the head, too, as a GPU's kernels take it; None: not so.

    Blocks of GGUF files are kept; other formats have no quantised embeddings.
    """
    if not w.is_in_blocks(name):
        return None
    if is_head:
        return _packed(w, name, dims, "embedding and head, one matrix")
    return _packed(w, name, dims, "the embedding", "kept packed, rows dequantised one by one")


def _packed(
    w: WeightSource, name: str, dims: Dims, whose: str, how: str | None = None
) -> Matrix | None:
    """Read a quantised matrix as a GPU's kernels for rows of 16 bits take it; None: not so.

    The start says `whose` it is, and how it is kept: as the form has it, if `how` is None.
    """
    if not packs_ends(w.target) or w.quantization == "none" or not w.is_quantised(name):
        return None
    found = w.quantized(name, dims.vocab_size, dims.hidden_size)
    form = None if found is None else form_of_ends(found, w.target, w.dtype)
    if found is None or form is None:
        return None
    w.note(f"{whose} of {found}: {how or form.name}")
    made = form.make(found)
    assert isinstance(made, Matrix), "it is packed for GEMMs"
    return made


def _as_stored(w: WeightSource, name: str, dims: Dims) -> Matrix | None:
    """Read the head's matrix as it is stored, if that is less than the model's dtype and the CPU
    kernels take it so.
    """
    if w.quantization != "none" and w.dtype_of(f"{name}.weight") in _HALVES:
        matrix = read_numbers(w, [name], [dims.vocab_size], dims.hidden_size, "the head's ")
        return None if matrix.groups is None else matrix
    if w.quantization == "none" or not w.is_quantised(name):
        return None
    found = w.quantized(name, dims.vocab_size, dims.hidden_size)
    if found is None or not takes_tiles(found, w.target, w.dtype):
        return None
    w.note(f"the head's weights of {found}: multiplied as they are by the CPU kernels")
    return make_tiles(found)


def _positions(w: WeightSource, dims: Dims, ends: Ends) -> Tensor | None:
    """Read the table of learned positions from that of the first one on."""
    if not ends.position_rows:
        return None
    rows = ends.position_rows + ends.position_offset
    table = w.at("model.embed_positions").tensor("weight", rows, dims.hidden_size)
    return table[ends.position_offset :]


def _head_weight(w: WeightSource, head: WeightSource, dims: Dims, multiplies: bool) -> Tensor:
    """Read the head's own matrix; that a quantised one is dequantised is said if it multiplies."""
    found = w.quantized("lm_head", dims.vocab_size, dims.hidden_size)
    if found is None:
        return head.tensor("weight", dims.vocab_size, dims.hidden_size)
    if multiplies:
        w.note(f"the head's weights of {found}: dequantised as they are loaded")
    out = torch.empty(dims.vocab_size, dims.hidden_size, dtype=w.dtype, device=w.device)
    write(found, out)
    return out
