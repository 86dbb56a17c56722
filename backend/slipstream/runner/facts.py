"""What must be the same on all ranks: each says it at its start, and a difference is named."""

import hashlib
from itertools import zip_longest
from pathlib import Path

import msgspec
import torch
from slipstream_runtime.ranks import RankMemory

from slipstream import __version__
from slipstream.errors import ConfigError
from slipstream.runner.plan import Plan

_END_BYTES = 1 << 18  # of each end of a file
_PIECE_BYTES = 4000  # of facts, at a time
_SHOWN = 64  # characters of a value
_BEFORE = 16  # of these, those before the first that differs
_ELSEWHERE = ("checkpoint", "draft_checkpoint")  # paths of a host; files of the first are compared


def facts_of(plan: Plan) -> dict[str, str]:
    """Return what must be the same on all ranks, by name, in the order in which it is compared."""
    settings = msgspec.to_builtins(plan.config)
    facts = {
        "version": __version__,
        "version of torch": str(torch.__version__),
        "kind of device": _device(plan),
        "dtype in use": str(plan.dtype).removeprefix("torch."),
    }
    facts |= {name: repr(value) for name, value in settings.items() if name not in _ELSEWHERE}
    files = sorted(path for path in plan.checkpoint.iterdir() if path.is_file())
    return facts | {f"{path.name} of the checkpoint": _file(path) for path in files}


def compare(plan: Plan, memory: RankMemory) -> None:
    """Raise `ConfigError` with the first fact in which a rank differs from rank 0."""
    own = msgspec.json.encode(facts_of(plan))
    sums = memory.gather(f"{len(own)} {hashlib.sha256(own).hexdigest()}".encode())
    if len(set(sums)) == 1:
        return
    most = max(int(each.split()[0]) for each in sums)
    texts = [b""] * memory.size
    for begin in range(0, most, _PIECE_BYTES):
        pieces = memory.gather(own[begin : begin + _PIECE_BYTES])
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    first, *others = [msgspec.json.decode(text, type=dict[str, str]) for text in texts]
    for rank, facts in enumerate(others, start=1):
        for name in first | facts:
            one, other = facts.get(name, "none"), first.get(name, "none")
            if one != other:
                shown, wanted = _shown(one, other)
                raise ConfigError(
                    f"{memory.name(rank)} has another {name} than rank 0: {shown}, not {wanted}"
                )


def _shown(one: str, other: str) -> tuple[str, str]:
    """Return two values, or of long ones what is around the first difference."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    alike = (x == y for x, y in zip_longest(one, other))
    begin = max(0, next(i for i, same in enumerate(alike) if not same) - _BEFORE)
    found = [text[begin : begin + _SHOWN] for text in (one, other)]
    return ("..." * (begin > 0) + found[0], "..." * (begin > 0) + found[1])


def _file(path: Path) -> str:
    """Return size and contents of a file, by its first and last bytes.

    Of weights that are all names and shapes, and some values. Times differ where hosts have copies.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        ends += file.read(_END_BYTES)
    return f"{size} bytes, {hashlib.sha256(ends).hexdigest()[:16]}"


def _device(plan: Plan) -> str:
    """Return the kind of the device: ranks of different GPUs would wait for the slowest."""
    is_cuda = plan.device.type == "cuda"
    return torch.cuda.get_device_name(plan.device) if is_cuda else plan.device.type
