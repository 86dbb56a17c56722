"""Sequences that stream: what none of a step's queries sees is NaN; attention in any precision."""

from dataclasses import dataclass

import torch
from kernels.attention_cases import Case, make_case
from slipstream.kernels.elementwise.rope import rotate
from torch import Tensor


@dataclass
class SinkCase:
    """A case whose tables lack `gaps[s]` tokens behind the sinks."""

    case: Case
    angles: Tensor  # [n, d]
    positions: Tensor  # [n]
    window: int
    num_sinks: int

    @property
    def near(self) -> int:
        return self.window - self.num_sinks


def make_sink_case(
    chunks: list[int],
    lengths: list[int],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    window: int,
    num_sinks: int,
    device: str = "cuda",
) -> SinkCase:
    """`lengths` are those of tables. Of blocks that nobody sees tables say nonsense."""
    case = make_case(chunks, lengths, heads, head_size, block_size, dtype, device)
    for s, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        hidden = range(num_sinks, max(num_sinks, length - max(chunk, 1) + 1 - window + num_sinks))
        for block in range(-(-length // block_size)):
            tokens = range(block * block_size, (block + 1) * block_size)
            unseen = [token % block_size for token in tokens if token in hidden]
            case.cache[case.block_tables[s, block], :, :, unseen] = float("nan")
            if len(unseen) == block_size:
                case.block_tables[s, block] = 2**30
    generator = torch.Generator().manual_seed(1)
    turns = torch.rand((sum(chunks), head_size // 2), generator=generator) * 6.3
    gaps = [block_size * (7 + 3 * s) if length > window else 0 for s, length in enumerate(lengths)]
    places = [
        torch.arange(length - chunk, length) + gap
        for chunk, length, gap in zip(chunks, lengths, gaps, strict=True)
    ]
    angles = torch.cat((turns.cos(), turns.sin()), 1).to(device)
    return SinkCase(case, angles, torch.cat(places).to(device), window, num_sinks)


def attend_sinks(x: SinkCase, dtype: torch.dtype) -> Tensor:
    """A token at a time; every intermediate in `dtype`."""
    case, out = x.case, torch.zeros(x.case.q.shape, dtype=dtype, device=x.case.q.device)
    block_size, group = case.cache.shape[3], case.q.shape[1] // case.cache.shape[1]
    turned = rotate(case.q.to(dtype), *x.angles.to(dtype).unsqueeze(1).chunk(2, dim=-1))
    row = 0
    for s, chunk in enumerate(case.chunks):
        length = int(case.lengths[s])
        table = torch.where(case.block_tables[s] < 2**30, case.block_tables[s], 0).long()
        places = torch.arange(length, device=case.q.device)
        k, v = (
            case.cache[table[places // block_size], :, part, places % block_size]
            .to(dtype)
            .repeat_interleave(group, 1)
            for part in (0, 1)
        )
        for place in range(length - chunk, length) if length else ():
            sinks = range(min(x.num_sinks, place + 1))
            near = range(max(x.num_sinks, place - x.near + 1), place + 1)
            scores = torch.cat(
                (
                    torch.einsum("hd,nhd->hn", turned[row], k[list(sinks)]),
                    torch.einsum("hd,nhd->hn", case.q[row].to(dtype), k[list(near)]),
                ),
                1,
            )
            weights = (scores * case.scale).softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, v[[*sinks, *near]])
            row += 1
        row += chunk if length == 0 else 0
    return out
