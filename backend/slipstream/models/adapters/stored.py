"""The tensors of an adapter's file by module: `base_model.model.MODULE.lora_A.weight` and more."""

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

import torch
from slipstream_contract.errors import clip
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.adapters.blocks import DTYPES, Block, Wanted, read_blocks
from slipstream.models.adapters.config import MAX_RANK, WHOLE, LoraConfig, PromptConfig
from slipstream.models.adapters.fused import Parameter, check_sides
from slipstream.models.adapters.patterns import MAX_NAME
from slipstream.models.adapters.workers import turn
from slipstream.models.entries import TensorEntry

DIGEST_BYTES = 16
_FORMAT = b"slipstream adapter 2 "  # what digests are of; the first was one a module
PIECE = 4 << 20  # bytes of modules that are read together
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "rows_a",
    "lora_embedding_B": "rows_b",
    "lora_magnitude_vector": "magnitude",
    "lora_A.bias": "bias",
    "lora_B.bias": "bias",
    "base_layer.weight": "base",
    "weight": "whole",
}
_HASHED = ("a", "rows_a", "b", "rows_b", "magnitude", "whole")  # what says what is computed
_OF_B = ("b", "rows_b")
_PROMPT = "prompt_embeddings"
Finder = Callable[[Collection[str]], Mapping[str, Parameter]]
_NAME = re.compile(rf"base_model\.model\.(.+?)\.({'|'.join(map(re.escape, _KINDS))})")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the file has of a module.

    a, b: of its term, `[r, inputs]` and `[outputs, r]`; of an embedding's rows `[r, rows]` and
    `[width, r]`.
    scale: what B is still to be multiplied by.
    magnitude: of each output, if the adapter has such (DoRA).
    base: the module's own matrix, which PEFT may write beside terms of head and embedding.
    whole: a matrix that takes the place of the module's; then there is no term.
    parameter: of all experts, whose terms lie in `a` and `b`; `module` is its name then.
    """

    module: str
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    is_rows: bool = False
    magnitude: Tensor | None = None
    base: Tensor | None = None
    whole: Tensor | None = None
    parameter: Parameter | None = None

    @property
    def rank(self) -> int:
        """The term's; 0: there is none."""
        count = 1 if self.parameter is None else self.parameter.mixture.count
        return 0 if self.a is None else self.a.shape[0] // count  # `len` takes longer


@dataclass(frozen=True, eq=False)
class Module:
    """The tensors of a module, or of a parameter of experts, by the ends of their names."""

    name: str
    entries: Mapping[str, TensorEntry]
    parameter: Parameter | None = None

    @property
    def known_as(self) -> str:
        """The name that patterns of the configuration know."""
        return self.name if self.parameter is None else self.parameter.name

    @functools.cached_property
    def kinds(self) -> dict[str, TensorEntry]:
        """Tensors by their kinds; of two biases one."""
        return {_KINDS[end]: entry for end, entry in self.entries.items()}

    @property
    def is_rows(self) -> bool:
        """Whether it is a term of an embedding's rows."""
        return "rows_a" in self.kinds or "rows_b" in self.kinds

    def kept(self) -> list[str]:
        """Return the kinds of those that say what is computed, in the order of digests."""
        return [kind for kind in _HASHED if kind in self.kinds]


def check_whole(modules: Sequence[Module], config: LoraConfig, path: Path) -> None:
    """Raise `CheckpointError` for a whole matrix that is none of head or embedding, or that takes
    the place of more than its own: PEFT loads what `modules_to_save` does not name into the model,
    where head and embedding may be one. So both must be there.
    """
    whole: dict[str, str] = {}
    for each in modules:
        turn()
        if "whole" in each.kinds:
            whole[each.name.rpartition(".")[2]] = each.name
    for end, name in whole.items():
        if end not in WHOLE:
            tensor = clip(f"{name}.weight", 128)
            raise CheckpointError(f"{path}: tensor {tensor} is none of a LoRA's")
        if end not in config.whole and not whole.keys() >= set(WHOLE):
            raise CheckpointError(
                f"{path}: tensor {name}.weight is a whole matrix, but modules_to_save of "
                f"adapter_config.json does not name it, nor are {' and '.join(WHOLE)} both there"
            )


def modules_of(
    entries: Mapping[str, TensorEntry],
    path: Path,
    most: int = 1 << 62,
    find: Finder = lambda modules: {},
) -> list[Module]:
    """Return what a file has of each module, by their names; raises `CheckpointError`.

    `most`: numbers of a tensor. What an entry says is checked before its bytes are read. `find`
    returns which modules are parameters of experts.
    """
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        turn()
        match = _NAME.fullmatch(name)
        if match is None or len(match[1]) > MAX_NAME:
            raise CheckpointError(f"{path}: tensor {clip(name, 128)} is none of a LoRA's")
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}: not implemented")
        found.setdefault(match[1], {})[match[2]] = entry
    parameters = find(found)
    modules = [Module(*each, parameters.get(each[0])) for each in sorted(found.items())]
    for module in modules:
        turn()
        own = most if module.parameter is None else module.parameter.most_elements
        for end, entry in module.entries.items():
            _check_size(f"{module.name}.{end}", entry.shape, own, path)
    return modules


def _check_size(tensor: str, shape: Sequence[int], most: int, path: Path) -> None:
    if math.prod([max(1, count) for count in shape]) > most:
        raise CheckpointError(
            f"{path}: tensor {tensor} is {clip(list(shape))}, more than the {most} numbers that "
            f"one of this model's has at most"
        )


def pieces_of(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Yield modules, in their order, in pieces that are read together."""
    piece: list[Module] = []
    size = 0
    for module in modules:
        piece.append(module)
        size += sum(entry.end - entry.begin for entry in module.entries.values())
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@dataclass(slots=True)
class ReadPiece:
    """Modules that were read, up to one with an error, if there is one."""

    stored: list[Stored] = field(default_factory=list)
    digest: bytes = b""  # of what says what is computed
    are_finite: bool = True  # all tensors that were rounded
    error: CheckpointError | None = None


def read_piece(
    modules: Iterable[Module],
    config: LoraConfig,
    file: BinaryIO,
    path: Path,
    dtype: torch.dtype | None = None,
) -> ReadPiece:
    """Read modules; in any thread.

    `dtype`: what tensors are rounded to, times the scaling; None: they stay as they are stored. So
    do those beside magnitudes.
    """
    found, scales = ReadPiece(), dict[Module, float]()
    wanted: dict[str, Wanted] = {}
    wrong: tuple[Module, CheckpointError] | None = None
    for module in modules:
        turn()
        try:
            scale = scales[module] = _scale_of(module, config, path)
        except CheckpointError as error:
            wrong = module, error
            break
        is_raw = dtype is None or "magnitude" in module.kinds
        for kind in module.kept():
            own = scale if kind in _OF_B and not is_raw else 1.0
            wanted[f"{module.name} {kind}"] = Wanted(module.kinds[kind], own, is_raw)
    blocks = read_blocks(file, wanted)
    found.digest = _digest(scales, blocks)
    for block in blocks:
        if dtype is not None and not block.is_raw:
            found.are_finite &= block.finish(dtype)
    tensors = dict(each for block in blocks for each in block.tensors())
    try:
        for module, scale in scales.items():
            turn()
            _refuse_bias(module, file, path)
            is_raw = dtype is None or "magnitude" in module.kinds
            stored = _stored(module, scale if is_raw else 1.0, tensors)
            if base := module.kinds.get("base"):
                stored = replace(stored, base=_tensor(file, base))
            found.stored.append(stored)
        if wrong is not None:
            _refuse_bias(wrong[0], file, path)
            raise wrong[1]
    except CheckpointError as error:
        found.error = error
    return found


def _refuse_bias(module: Module, file: BinaryIO, path: Path) -> None:
    for end, entry in module.entries.items():
        if _KINDS[end] == "bias" and _tensor(file, entry).count_nonzero():
            name = module.name
            raise CheckpointError(f"{path}: {name} has a bias (lora_bias): not implemented")


def _digest(scales: Mapping[Module, float], blocks: Sequence[Block]) -> bytes:
    """Hash what modules compute: how their tensors lie in blocks, and the blocks."""
    # Processors have instructions for it: 2.0 GB/s on a Zen 5, where BLAKE2b has 1.4.
    modules = [(module.known_as, scale) for module, scale in scales.items()]
    said = repr((modules, [block.described for block in blocks])).encode()
    digest = sha256(len(said).to_bytes(8) + said)
    for block in blocks:
        block.add_to(digest)
    return digest.digest()


def whole_digest(pieces: Sequence[bytes]) -> bytes:
    """Return the digest of an adapter, of those of its pieces in their order.

    Pieces of another size, or of blocks that are made otherwise, are of another `_FORMAT`.
    """
    digest = blake2b(_FORMAT, digest_size=DIGEST_BYTES)
    digest.update(PIECE.to_bytes(8) + b"".join(pieces))
    return digest.digest()


def stored_prompt(
    entries: Mapping[str, TensorEntry], config: PromptConfig, file: BinaryIO, path: Path
) -> Tensor:
    """Return the rows of prompt tuning, `[tokens, width]`; raises `CheckpointError`."""
    if set(entries) != {_PROMPT}:
        others = sorted(set(entries) - {_PROMPT})
        raise CheckpointError(
            f"{path}: tensor {clip(others[0], 128)} is none of prompt tuning's"
            if others
            else f"{path}: tensor {_PROMPT} is missing"
        )
    entry = entries[_PROMPT]
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {_PROMPT} is {entry.dtype}: not implemented")
    if list(entry.shape) != [config.num_tokens, config.width]:
        raise CheckpointError(
            f"{path}: tensor {_PROMPT} is {clip(list(entry.shape))}, but adapter_config.json says "
            f"{[config.num_tokens, config.width]}"
        )
    return _tensor(file, entry)


def _tensor(file: BinaryIO, entry: TensorEntry) -> Tensor:
    """Read a tensor alone."""
    block = read_blocks(file, {"": Wanted(entry)})[0]
    return dict(block.tensors())[""]


def _scale_of(module: Module, config: LoraConfig, path: Path) -> float:
    """Return what B of a module is multiplied by. Raises `CheckpointError` if its tensors are not
    those of a term, or of a whole matrix.
    """
    kinds, name = module.kinds, module.name
    if kinds.keys() == {"whole"}:
        return 1.0
    if module.parameter is not None:
        return _scale_of_parameter(module, module.parameter, config, path)
    if key := config.left_out_by(name):
        raise CheckpointError(
            f"{path}: {clip(name, 128)} has tensors, but {key} of adapter_config.json leaves it out"
        )
    side_a, side_b = ("rows_a", "rows_b") if module.is_rows else ("a", "b")
    allowed = {side_a, side_b, "bias", "base", *(["magnitude"] if config.has_magnitudes else [])}
    if extra := kinds.keys() - allowed:
        raise CheckpointError(f"{path}: {name} has {sorted(extra)[0]} beside a term: no such is")
    _check_sides_there(module, side_a, side_b, path)
    if config.has_magnitudes and "magnitude" not in kinds:
        raise CheckpointError(f"{path}: tensor {name}.lora_magnitude_vector is missing")
    a, b = kinds[side_a].shape, kinds[side_b].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        shapes = f"{list(a)} and {list(b)}"
        raise CheckpointError(f"{path}: {name}: A and B are {shapes}: no rank fits both")
    rank = a[0]
    _check_rank(name, rank, config, path)
    magnitude = kinds.get("magnitude")
    if magnitude is not None and magnitude.shape != b[:1]:
        raise CheckpointError(
            f"{path}: {name}.lora_magnitude_vector is {list(magnitude.shape)}, not {list(b[:1])}"
        )
    return config.scale_of(name, rank)


def _scale_of_parameter(
    module: Module, parameter: Parameter, config: LoraConfig, path: Path
) -> float:
    """Return what B of a parameter of experts is multiplied by; raises `CheckpointError`."""
    kinds, name = module.kinds, parameter.name
    if extra := kinds.keys() - {"a", "b", "bias"}:
        raise CheckpointError(
            f"{path}: {module.name} has {sorted(extra)[0]} beside a term: no such is"
        )
    _check_sides_there(module, "a", "b", path)
    rank = check_sides(parameter, kinds["a"].shape, kinds["b"].shape, config, f"{path}: {name}")
    _check_rank(name, rank, config, path)
    return config.scale_of(name, rank)


def _check_sides_there(module: Module, side_a: str, side_b: str, path: Path) -> None:
    for key, side in ((side_a, "A"), (side_b, "B")):
        if key not in module.kinds:
            kind = f"lora_embedding_{side}" if key.startswith("rows") else f"lora_{side}.weight"
            raise CheckpointError(f"{path}: tensor {module.name}.{kind} is missing")


def _check_rank(name: str, rank: int, config: LoraConfig, path: Path) -> None:
    wanted = config.rank_of(name)
    if rank != wanted or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(
            f"{path}: {name} has rank {rank}, but adapter_config.json says {wanted} "
            f"(1 to {MAX_RANK} are served)"
        )


def _stored(module: Module, scale: float, tensors: Mapping[str, Tensor]) -> Stored:
    own = {kind: tensors[f"{module.name} {kind}"] for kind in module.kept()}
    if "whole" in own:
        return Stored(module.name, whole=own["whole"])
    a, b = (own[side] for side in (("rows_a", "rows_b") if module.is_rows else ("a", "b")))
    given = module.known_as, a, b, scale, module.is_rows, own.get("magnitude")
    return Stored(*given, parameter=module.parameter)
