"""Read a PEFT directory: what it has of each module, as terms of the decoder's places.

What the decoder changes of a checkpoint's matrices as it loads them, it changes of an adapter's:
rows of B (q, k and v that lie in one matrix, pairs that rotate), or columns of A (padded heads).
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.fuse.adapt import EMBEDDING, HEAD, VIRTUAL
from slipstream.layers.adapted import Term
from slipstream.layers.embedding import Table
from slipstream.layers.magnitudes import folded
from slipstream.models.adapters.blocks import are_finite
from slipstream.models.adapters.config import LoraConfig, PromptConfig, read_config
from slipstream.models.adapters.folder import AdapterFolder
from slipstream.models.adapters.fused import Parameter, of_ranks, parameters_of, term_of
from slipstream.models.adapters.keys import key_terms
from slipstream.models.adapters.stored import (
    DIGEST_BYTES,
    Module,
    ReadPiece,
    Stored,
    check_whole,
    modules_of,
    pieces_of,
    read_piece,
    stored_prompt,
    whole_digest,
)
from slipstream.models.adapters.targets import Part, Targets
from slipstream.models.adapters.workers import in_threads, turn
from slipstream.models.files import header_entries, without_weights

FILE = "adapter_model.safetensors"
MAX_HEADER = 16 << 20  # bytes of JSON, which are parsed in one piece
_MOST_APART = 0.01  # of the largest value: how far a stored base may be from ours


PlaceTerms = Mapping[str, tuple[Term, ...]]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in host memory: its terms by the decoder's places, in the model's dtype.

    Of several ranks' they are those of rank 0; `others` are those of all others, in order. Layers
    have the numbers that the whole model gives them.
    """

    terms: PlaceTerms
    digest: bytes  # of tensors and scalings
    rank: int  # the largest
    others: tuple[PlaceTerms, ...] = ()
    has_magnitudes: bool = False  # which ranks fold together; see `Term`
    of_inputs: frozenset[str] = frozenset()  # places of which ranks have parts of the inputs then

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, of the rank with most."""
        return max(bytes_of(terms) for terms in (self.terms, *self.others))

    @property
    def changes_head(self) -> bool:
        """Whether logits of the same states are others."""
        return HEAD in self.terms

    @property
    def num_virtual(self) -> int:
        """How many virtual tokens it has."""
        return sum(len(term.b) for term in self.terms.get(VIRTUAL, ()))


def bytes_of(terms: PlaceTerms) -> int:
    """Count the bytes of all tensors of terms."""
    return sum(term.num_bytes for found in terms.values() for term in found)


class RankTerms:
    """The terms of an adapter, as each of the ranks of `targets` has them; see `Part`."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._of_ranks: list[dict[str, list[Term]]] = [{} for _ in range(targets.num_ranks)]
        self._of_inputs: set[str] = set()

    def add(self, part: Part, term: Term, parameter: Parameter | None = None) -> None:
        """Take a term of a part, or of a parameter of experts, whose first part that is."""
        if part.is_of_inputs:
            self._of_inputs.add(part.place)
        ranks = self._targets.ranks_of(part.place)
        found = part.of_ranks(term) if parameter is None else of_ranks(parameter, term)
        for rank, own in zip(ranks, found, strict=True):
            self._of_ranks[rank].setdefault(part.place, []).append(own)

    def weights(self, digest: bytes, rank: int, has_magnitudes: bool = False) -> AdapterWeights:
        """Return all of them."""
        of_ranks: list[dict[str, tuple[Term, ...]]] = []
        for found in self._of_ranks:
            of_ranks.append({})
            for place, each in found.items():
                turn()
                of_ranks[-1][place] = joined(each)
        own, *others = of_ranks
        for place, terms in own.items():
            own[place] = tuple(_alone(x) if others or x.gain is not None else x for x in terms)
        has = has_magnitudes, frozenset(self._of_inputs)
        return AdapterWeights(own, digest, rank, tuple(others), *has)


def _alone(term: Term) -> Term:
    """Return a term that keeps no memory but its own: a tensor that lies among others, as they were
    read, would keep those of other ranks, and what magnitudes were folded into.
    """

    def alone(x: Tensor) -> Tensor:
        return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()

    a, gain = (None if x is None else alone(x) for x in (term.a, term.gain))
    return Term(term.first, a, alone(term.b), gain)


def read_adapter(
    directory: Path, targets: Targets, dtype: torch.dtype, root: str = ""
) -> AdapterWeights:
    """Read and check an adapter; raises `CheckpointError` (file, tensor or key, value).

    `root`: below which all that is read must lie; see `AdapterFolder`.
    """
    with AdapterFolder(directory, root) as folder:
        config, path = read_config(folder), directory / FILE
        with tensors_of(folder) as file, _unchanged(file, path):
            entries = header_entries(file, path, MAX_HEADER, turn)
            if isinstance(config, PromptConfig):
                table = stored_prompt(entries, config, file, path)
                if config.has_keys:
                    return of_keys(table, targets, dtype, str(path))
                return of_table(table, targets, dtype, str(path))
            lora = config

            def find(modules: Collection[str]) -> Mapping[str, Parameter]:
                return parameters_of(modules, lora, targets, path)

            modules = modules_of(entries, path, targets.most_elements, find)
            check_whole(modules, lora, path)
            return _of_modules(Source(modules, config, file, path), targets, dtype)


@contextmanager
def _unchanged(file: BinaryIO, path: Path) -> Iterator[None]:
    """Raise `CheckpointError` if a file is written to in this block, as far as its times say so.

    Another file that takes its place does no harm.
    """
    before = os.fstat(file.fileno())
    yield
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise CheckpointError(f"{path}: it changed while it was read")


def tensors_of(folder: AdapterFolder) -> BinaryIO:
    """Open the tensors of an adapter; raises `CheckpointError`."""
    if not (folder.here / FILE).is_symlink() and not (folder.here / FILE).exists():
        raise without_weights(folder.here, FILE, folder.directory)
    return folder.open(FILE)


class Source(NamedTuple):
    """Modules of an adapter, and what they are read by."""

    modules: Sequence[Module]
    config: LoraConfig
    file: BinaryIO
    path: Path


def _of_modules(source: Source, targets: Targets, dtype: torch.dtype) -> AdapterWeights:
    """Read the modules of an adapter, in pieces, by several threads."""
    terms: dict[str, list[Term]] = {}
    rank_terms = RankTerms(targets)
    given: dict[tuple[str, int], str] = {}
    spare: list[tuple[Part, Term]] = []  # whole matrices that are the model's own
    digests: list[bytes] = []
    rank, has_magnitudes, are_finite = 0, False, True
    path = source.path

    def made(piece: Sequence[Module]) -> _Made:
        return _made(read_piece(piece, *source[1:], dtype), targets, dtype, path)

    with closing(in_threads(made, pieces_of(source.modules))) as pieces:
        for found in pieces:
            are_finite &= found.are_finite
            for stored, part, term in found.terms:
                turn()
                before = given.setdefault((part.place, part.first), stored.module)
                if before != stored.module:
                    raise CheckpointError(f"{path}: {stored.module} is {before} by another name")
                if isinstance(term, CheckpointError):
                    raise term
                if term is None:
                    has_magnitudes |= targets.num_ranks > 1
                    term = _term(part, stored, dtype, path, targets)
                if stored.whole is not None and targets.have(part, term.b):
                    spare.append((part, term))
                    continue
                rank = max(rank, stored.rank)
                terms.setdefault(part.place, []).append(term)
                rank_terms.add(part, term, stored.parameter)
            digests.append(found.digest)
            if found.error is not None:
                raise found.error
    for part, term in () if terms else spare:
        terms[part.place] = [term]
        rank_terms.add(part, term)
    if not terms:
        raise CheckpointError(f"{path}: it has no tensors: an adapter of nothing")
    if not are_finite:
        check_range(terms, dtype, path)
    return rank_terms.weights(whole_digest(digests), rank, has_magnitudes)


class _Made(NamedTuple):
    """What a thread has made of modules, up to one that is wrong."""

    terms: list[tuple[Stored, Part, Term | CheckpointError | None]]  # None: it has magnitudes
    digest: bytes
    are_finite: bool  # all tensors of the terms, for sure
    error: CheckpointError | None


def _made(found: ReadPiece, targets: Targets, dtype: torch.dtype, path: Path) -> _Made:
    """Make the terms of modules, but those with magnitudes, for which layers are run."""
    terms: list[tuple[Stored, Part, Term | CheckpointError | None]] = []
    are_finite, error = found.are_finite, found.error
    for stored in found.stored:
        turn()
        if (parameter := stored.parameter) is not None:
            assert stored.a is not None
            assert stored.b is not None
            own = term_of(parameter, stored.a, stored.b)
            terms.append((stored, parameter.parts[0], own))
            continue
        try:
            parts = _parts(targets, stored, path)
        except CheckpointError as wrong:
            error = wrong
            break
        for part in parts:
            term: Term | CheckpointError | None = None
            try:
                if stored.magnitude is None:
                    term = _term(part, stored, dtype, path, targets)
            except CheckpointError as wrong:
                term = wrong
            terms.append((stored, part, term))
            are_finite &= stored.magnitude is None
    return _Made(terms, found.digest, are_finite, error)


def of_table(
    table: Tensor, targets: Targets, dtype: torch.dtype, where: str, tag: bytes = b""
) -> AdapterWeights:
    """Return virtual tokens as an adapter, `[rows, hidden]`; raises `CheckpointError`.

    `tag` is in the digest beside the rows.
    """
    if table.ndim != 2 or not len(table) or table.shape[1] != targets.embedding_size:
        raise CheckpointError(
            f"{where}: the rows are {list(table.shape)}, "
            f"not [1 or more, {targets.embedding_size}], as wide as the model's embedding"
        )
    rows = table.to(dtype).contiguous()
    terms = {VIRTUAL: [Term(0, None, rows)]}
    check_range(terms, dtype, where)
    digest = _digest_of(b"virtual tokens " + tag, rows)
    of_ranks: list[PlaceTerms] = [{} for _ in range(targets.num_ranks)]
    for rank in targets.ranks_of(VIRTUAL):
        of_ranks[rank] = {VIRTUAL: tuple(terms[VIRTUAL])}
    own, *others = of_ranks
    return AdapterWeights(own, digest, 0, tuple(others))


def of_keys(table: Tensor, targets: Targets, dtype: torch.dtype, where: str) -> AdapterWeights:
    """Return virtual tokens with keys and values as an adapter; see `key_terms`.

    Their embeddings are zeros: nothing but keys and values of such tokens is ever read.
    """
    embeddings = torch.zeros(len(table), targets.embedding_size, dtype=dtype)
    made: list[PlaceTerms] = []
    for rank, terms in enumerate(key_terms(table, targets, dtype, where)):
        if rank in targets.ranks_of(VIRTUAL):
            terms[VIRTUAL] = [Term(0, None, embeddings)]
        check_range(terms, dtype, where)
        made.append({name: tuple(each) for name, each in terms.items()})
    own, *others = made
    return AdapterWeights(own, _digest_of(b"keys", table.contiguous()), 0, tuple(others))


def _digest_of(tag: bytes, rows: Tensor) -> bytes:
    digest = blake2b(tag, digest_size=DIGEST_BYTES)
    digest.update(f" {rows.dtype} {tuple(rows.shape)} ".encode())
    digest.update(rows.view(torch.uint8).numpy().data)
    return digest.digest()


def _parts(targets: Targets, stored: Stored, path: Path) -> list[Part]:
    parts = targets.parts(stored.module)
    is_embedding = bool(parts) and parts[0].place == EMBEDDING
    is_end = bool(parts) and parts[0].place in (EMBEDDING, HEAD)
    if not parts or (stored.whole is not None and not is_end):
        raise CheckpointError(
            f"{path}: module {clip(stored.module, 128)} is none that adapters change here: "
            f"{targets.kinds} of the {targets.num_layers} layers are"
        )
    if stored.whole is None and stored.is_rows != is_embedding:
        kind = "an embedding" if is_embedding else "no embedding"
        raise CheckpointError(f"{path}: module {stored.module} is {kind}, its tensors are not so")
    if stored.magnitude is not None and parts[0].linear is None:
        kind = "an embedding" if is_embedding else "matrices that are not multiplied alone"
        raise CheckpointError(f"{path}: {stored.module}: magnitudes (use_dora) of {kind}")
    return parts


def _term(part: Part, stored: Stored, dtype: torch.dtype, path: Path, targets: Targets) -> Term:
    """Return a part of a module as the decoder has its matrix; magnitudes are folded if one rank
    has all weights.
    """
    where = f"{path}: {stored.module}"
    if stored.whole is not None:
        _check_whole(part, stored.whole, where)
        return Term(part.first, None, stored.whole.to(dtype))
    assert stored.a is not None
    assert stored.b is not None
    if stored.base is not None:
        _check_whole(part, stored.base, where)
        if part.table is None or (
            targets.has_weights and _is_apart(part.own(stored.base), part.table, part.kind.device)
        ):
            raise CheckpointError(f"{where}: base_layer.weight is not the model's matrix")
    b = stored.b
    if stored.scale != 1.0 or stored.magnitude is not None:
        b = b.float() * stored.scale
    if stored.is_rows:
        if stored.a.shape[1] != part.outputs or len(b) != part.inputs:
            raise _misshapen(part, stored, where)
        return Term(0, stored.a.t().to(dtype).contiguous(), _rounded(b, dtype))
    a, b = _sides(part, stored, b, where)
    a, gain = _rounded(a, dtype), None
    if stored.magnitude is not None:
        gain = part.of_b(stored.magnitude.float()[:, None])[:, 0]
        if targets.num_ranks > 1 or not targets.has_weights:
            return Term(part.first, a, b.contiguous(), gain)
        b, gain = folded(b, gain, part.squares(a, b))
    return Term(part.first, a, _rounded(b, dtype), gain)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype without gaps; itself if it is one."""
    return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()


def _is_apart(base: Tensor, ours: Table, device: torch.device) -> bool:
    """Return whether a stored base is another matrix than ours, whose rows are on a device."""
    far = most = 0.0
    for here, rows in ours.parts(device):
        numbers = rows.float().cpu()
        far = max(far, float((base[here].float() - numbers).abs().max()))
        most = max(most, float(numbers.abs().max()))
    return far > _MOST_APART * most


def _check_whole(part: Part, matrix: Tensor, where: str) -> None:
    if tuple(matrix.shape) != (part.outputs, part.inputs):
        raise CheckpointError(
            f"{where}: the matrix is {list(matrix.shape)}, the model's "
            f"{[part.outputs, part.inputs]}: a vocabulary that grew is not implemented"
        )


def _misshapen(part: Part, stored: Stored, where: str) -> CheckpointError:
    assert stored.a is not None
    assert stored.b is not None
    return CheckpointError(
        f"{where}: A is {list(stored.a.shape)} and B {list(stored.b.shape)}, which give no "
        f"{part.outputs} outputs of {part.inputs} inputs"
    )


def _sides(part: Part, stored: Stored, b: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return A and B of a part."""
    assert stored.a is not None
    try:
        a, b = part.of_a(stored.a), part.of_b(b)
    except (RuntimeError, IndexError):  # a view of other sizes
        a, b = stored.a, b[:0]
    if a.shape != (stored.rank, part.inputs) or b.shape != (part.outputs, stored.rank):
        raise _misshapen(part, stored, where)
    return a, b


def check_range(terms: Mapping[str, list[Term]], dtype: torch.dtype, path: Path | str) -> None:
    """Refuse numbers that are not finite in the model's dtype."""
    for place, found in terms.items():
        for term in found:
            for name, x in (("A", term.a), ("B", term.b), ("magnitude", term.gain)):
                if x is not None and not are_finite(x):
                    raise CheckpointError(
                        f"{path}: {place}: {name}, times the scaling, holds NaN, infinity or "
                        f"values beyond {str(dtype).removeprefix('torch.')}"
                    )


def joined(terms: list[Term]) -> tuple[Term, ...]:
    """Join terms of neighbouring outputs that share their A: those of a fused module."""
    out: list[Term] = []
    for term in sorted(terms, key=lambda term: term.first):
        last = out[-1] if out else None
        if last is not None and _continues(last, term):
            gain = None
            if last.gain is not None and term.gain is not None:
                gain = torch.cat([last.gain, term.gain])
            out[-1] = Term(last.first, last.a, torch.cat([last.b, term.b]), gain)
        else:
            out.append(term)
    return tuple(out)


def _continues(last: Term, term: Term) -> bool:
    if last.a is None or term.a is None or last.first + last.b.shape[0] != term.first:
        return False
    # Most differ in their first row: threads that compare the whole take longer to wake up.
    are_same = torch.equal(last.a[0], term.a[0]) and torch.equal(last.a, term.a)
    return (last.gain is None) == (term.gain is None) and are_same
