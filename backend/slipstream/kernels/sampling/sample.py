"""Sampling of one token a row of logits: penalties, edits, choice; no sort on the GPU.

A row's random numbers are Philox4x32-10 (Salmon et al., 2011) of (seed, output number, token id),
so a sequence gets the same tokens whatever else is in the batch. Sampling is by Gumbel-max:
the argmax of `logit / temperature + gumbel` over the kept tokens samples their softmax.

One record (`ROW`) says how to sample a row: what requests choose, by the table of
`slipstream_contract.sampling`, and where the row belongs. The device keeps count of the tokens of
every sequence that has penalties (`counts`, a row for each slot), because the host schedules a step
before it knows the token of the step before.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from slipstream_contract.sampling import FIELDS
from torch import Tensor

from slipstream.core.batch import Outcome
from slipstream.kernels.runtime import jit, team
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

_OWN = (  # of the row, behind what the request chose
    ("slot", "<i4"),  # row of `counts`; any, without penalties
    ("seed", "<i8"),
    ("number", "<i4"),  # of the token in its output
    ("result", "<i4"),  # where the token goes; -1: nowhere, the row is padding
    ("first_edit", "<i4"),
    ("end_edit", "<i4"),
    ("mask_tag", "<i4"),  # of `constrain`; 0: the row has no mask
    # What `narrow` made of the filters, on the device: the id of the likeliest token that is kept,
    # plus 1; 0: nothing. The temperature, and the lowest and highest logit over it that are kept.
    ("likeliest", "<i4"),
    ("heat", "<f4"),
    ("low", "<f4"),
    ("high", "<f4"),
)
_NUMPY, _CUDA = {int: "<i4", float: "<f4"}, {int: "int", float: "float"}
CHOSEN = {entry.field.device: name for name, entry in FIELDS.items() if entry.field.device}
"""Field of a record -> field of `SamplingParams`. Those of no effect are the defaults there, but
temperature 0 is greedy."""


def _record() -> np.dtype[np.void]:
    """`struct Parameters` of sample_row.cuh, laid out as C does, a multiple of 16 bytes."""
    chosen = [(field, _NUMPY[FIELDS[name].kind]) for field, name in CHOSEN.items()]
    plain = np.dtype([*chosen, *_OWN], align=True)
    assert plain.fields is not None
    kinds, offsets = zip(*(plain.fields[name][:2] for name in plain.names or ()), strict=True)
    size = -(-plain.itemsize // 16) * 16
    layout: Any = {"names": plain.names, "formats": kinds, "offsets": offsets, "itemsize": size}
    record: np.dtype[np.void] = np.dtype(layout)
    return record


ROW = _record()
EDIT = np.dtype([("token_id", "<i4"), ("addend", "<f4")])
ROW_WORDS, EDIT_WORDS = ROW.itemsize // 4, EDIT.itemsize // 4
MAX_COUNT = 0x7FFF  # of a token in an output; a bit more tells that the prompt has it
_IN_PROMPT = -0x8000

GROUP = 4  # tokens of an access, as in sample_row.cuh
_MASK32 = 0xFFFFFFFF


def _mul32(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low halves of a 32 x 32 bit product; int64 wraps, which keeps all of its 64 bits."""
    product = a * m
    return (product >> 32) & _MASK32, product & _MASK32


def philox(seeds: Tensor, counters: Tensor, num_tokens: int) -> Tensor:
    """32 random bits for each (row, token id), `[rows, num_tokens]` int64.

    Key: the seed's low and high words. Counter: (token id // 4, output number, 0, 0), of whose four
    words this is number token id % 4.
    """
    quads = torch.arange(-(-num_tokens // 4), device=seeds.device)
    return philox_words(seeds, counters, quads)[:, :num_tokens]


def philox_words(seeds: Tensor, counters: Tensor, quads: Tensor) -> Tensor:
    """The four random words of each of `quads [q]`, for each row: `[rows, 4 q]` int64."""
    key0, key1 = (seeds & _MASK32)[:, None], ((seeds >> 32) & _MASK32)[:, None]
    c0 = quads.expand(len(seeds), len(quads))
    c1 = (counters[:, None] & _MASK32).expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        hi0, lo0 = _mul32(c0, 0xD2511F53)
        hi1, lo1 = _mul32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ key0, lo1, hi0 ^ c3 ^ key1, lo0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)


def uniform(bits: Tensor) -> Tensor:
    """Numbers above 0 and below 1 of random words, exact in fp32."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _gumbel(bits: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform(bits)))


def _falling(x: Tensor) -> Tensor:
    """Each row by falling value."""
    if x.is_cuda:
        return x.sort(dim=-1, descending=True).values
    return torch.from_numpy(-np.sort(-x.numpy()))  # in a fifth of torch's time


def _keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens to keep: top k, of those the smallest set of mass p, of those min p.

    Each of the three keeps a prefix of the ranking, so the shortest prefix's last logit decides.
    Ties stay.
    """
    if not bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        return torch.ones_like(scaled, dtype=torch.bool)
    order = _falling(scaled)
    k = torch.where(top_k > 0, top_k, scaled.shape[-1]).clamp(max=scaled.shape[-1]).long()
    kth = order.gather(-1, (k - 1)[:, None])
    # In double: the borders of 128k additions should not hang on their order.
    ranked = torch.where(order >= kth, order, float("-inf")).double().softmax(-1)
    before = ranked.cumsum(-1) - ranked  # the mass of likelier tokens
    kept = (before < top_p[:, None]) | (top_p >= 1)[:, None]  # rounding cuts no tail of a whole
    kept &= (ranked >= min_p[:, None] * ranked[:, :1]) & (order >= kth)
    num_kept = kept.cumprod(-1).sum(-1, keepdim=True).clamp(min=1)
    return scaled >= order.gather(-1, num_kept - 1)


class _Rows:
    """The fields of `rows [n, ROW_WORDS]` as tensors `[n]`."""

    def __init__(self, rows: Tensor) -> None:
        def column(name: str) -> Tensor:
            assert ROW.fields is not None
            kind, offset = ROW.fields[name][:2]
            view = {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64}[kind.str[1:]]
            return rows.view(view)[:, offset // kind.itemsize]

        self.likeliest = column("likeliest")
        self.low, self.high = column("low"), column("high")
        self.top_k = column("top_k")
        self.is_narrow = self.likeliest > 0
        self.temperature = torch.where(self.is_narrow, column("heat"), column("temperature"))
        self.top_p, self.min_p = column("top_p"), column("min_p")
        self.repetition, self.presence = column("repetition"), column("presence")
        self.frequency, self.slot = column("frequency"), column("slot").long()
        self.seed, self.number = column("seed"), column("number").long()
        self.result = column("result").long()
        self.first_edit, self.end_edit = column("first_edit").long(), column("end_edit").long()
        self.has_penalties = (
            (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)
        ) & (self.result >= 0)


def _kept(scaled: Tensor, rows: _Rows, which: Tensor) -> Tensor:
    """Return which tokens rows `which` keep, `[w, v]`, by their own filters or by `narrow`."""
    is_narrow = rows.is_narrow[which]
    top_k = torch.where(is_narrow, 0, rows.top_k[which])
    top_p = torch.where(is_narrow, 1.0, rows.top_p[which])
    min_p = torch.where(is_narrow, 0.0, rows.min_p[which])
    keep = _keep(scaled, top_k, top_p, min_p)
    if bool(is_narrow.any()):
        low = torch.where(is_narrow, rows.low[which], float("-inf"))[:, None]
        high = torch.where(is_narrow, rows.high[which], float("inf"))[:, None]
        keep &= (scaled >= low) & (scaled <= high)
    return keep


def edited_logits(logits: Tensor, rows: Tensor, edits: Tensor, counts: Tensor) -> Tensor:
    """Return fp32 logits `[n, v]` after edits and penalties; arguments are those of `sample`."""
    return _edited(logits, _Rows(rows), edits, counts)


def _edited(logits: Tensor, rows: _Rows, edits: Tensor, counts: Tensor) -> Tensor:
    """fp32 logits `[n, v]` after edits and penalties."""
    addends = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    lengths = (rows.end_edit - rows.first_edit).clamp(min=0)
    if int(lengths.sum()) > 0:
        owners = torch.repeat_interleave(lengths)
        within = torch.arange(len(owners), device=logits.device)
        within -= (lengths.cumsum(0) - lengths)[owners]
        picked = edits[rows.first_edit[owners] + within]
        addends[owners, picked[:, 0].long()] = picked[:, 1].contiguous().view(torch.float32)
    edited = logits.float() + addends
    which = rows.has_penalties.nonzero()[:, 0]
    if len(which) > 0:
        state = counts[rows.slot[which]]
        count = (state & MAX_COUNT).float()
        factor = torch.where(state != 0, rows.repetition[which][:, None], 1.0)
        penalty = rows.presence[which][:, None] + rows.frequency[which][:, None] * count
        penalty = torch.where(count > 0, penalty, 0.0)
        picked = edited[which]
        penalised = torch.where(picked > 0, picked / factor, picked * factor) - penalty
        edited = edited.index_copy(0, which, penalised)
    return edited


def processed_logits(
    logits: Tensor, rows: Tensor, edits: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return fp32 logits `[n, v]` and temperatures `[n, 1]`: softmax of their ratio is sampled.

    Arguments are those of `sample`, `counts` as they were before it. Logits are edited, and -inf
    where a filter cut; a greedy row has no filter, and temperature 1.
    """
    row = _Rows(rows)
    edited = _edited(logits, row, edits, counts)
    highest = edited.amax(-1)
    greedy = ~((1 / row.temperature).isfinite() & (highest / row.temperature).isfinite())
    temperature = torch.where(greedy, 1.0, row.temperature)[:, None]
    which = (~greedy).nonzero()[:, 0]
    if len(which) > 0:
        scaled = edited[which] / temperature[which]
        keep = _kept(scaled, row, which)
        edited[which] = torch.where(keep, edited[which], float("-inf"))
    return edited, temperature


class SampleCall(NamedTuple):
    """Arguments of `sample`."""

    logits: Tensor  # [n, v] fp32, fp16 or bf16
    rows: Tensor  # `ROW` records as words
    edits: Tensor  # `EDIT` records likewise
    counts: Tensor  # [slots, v], see `count_tokens`; a slot belongs to one row
    token_ids: Tensor  # [r], written
    log_probs: Tensor  # [r], written
    outcomes: Tensor  # [r], written
    mirrors: Sequence[Tensor] = ()  # three more like these, in pinned host memory, get the same

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors that are written, and mirrored."""
        return self.token_ids, self.log_probs, self.outcomes


@op(
    f"logits[n,v]:T, rows[n,{ROW_WORDS}]:i32, edits[e,2]:i32, counts[s,v]:i16, "
    "token_ids[r]:i64, log_probs[r]:f32, outcomes[r]:u8",
    package=__package__,
)
@flattened(SampleCall)
def sample(call: SampleCall) -> None:
    """Sample one token of each row of logits, as `ROW` says, into the results' `row.result`.

    A logit is converted to fp32, plus its edit (`EDIT`; `first_edit .. end_edit - 1`, by rising
    token id), then `l / repetition if l > 0 else l * repetition` where prompt or output has the
    token, minus `presence + frequency * count` where the output has it. With penalties the token is
    counted at once; without, `counts` is neither read nor written.

    Temperature 0, or so near it that 1 or the logits overflow when divided by it, is greedy (the
    lowest id of equal logits). `log_probs` are of the chosen token under the softmax of the edited
    logits. The outcome of a row with a NaN or +inf, or with nothing but -inf, is
    `Outcome.NOT_FINITE`: its token is 0, and is not counted.
    """
    logits, rows, edits, counts, *_, mirrors = call
    row = _Rows(rows)
    logits = _edited(logits, row, edits, counts)
    highest = logits.amax(-1)  # NaN if any is
    finite = highest.isfinite()
    greedy = ~((1 / row.temperature).isfinite() & (highest / row.temperature).isfinite())
    scaled = logits / torch.where(greedy, 1.0, row.temperature)[:, None]
    if not bool(greedy.all()):
        which = (~greedy).nonzero()[:, 0]
        perturbed = scaled[which]
        keep = _kept(perturbed, row, which)
        perturbed += _gumbel(philox(row.seed[which], row.number[which], logits.shape[-1]))
        scaled[which] = torch.where(keep, perturbed, float("-inf"))
    chosen = torch.where(finite, scaled.argmax(-1), 0)
    chosen_log_probs = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    chosen_log_probs = torch.where(finite, chosen_log_probs, torch.nan)
    outcome = torch.where(finite, int(Outcome.SAMPLED), int(Outcome.NOT_FINITE)).to(torch.uint8)
    is_sampled = row.result >= 0
    where = row.result[is_sampled]
    for out, values in zip(call.results, (chosen, chosen_log_probs, outcome), strict=True):
        out[where] = values[is_sampled]
    for mirror, out in zip(mirrors, call.results, strict=False):
        mirror.copy_(out)
    counted = row.has_penalties & finite
    place = (row.slot[counted], chosen[counted])
    state = counts[place]
    counts[place] = state + ((state & MAX_COUNT) < MAX_COUNT).to(torch.int16)


@op("counts[s,v]:i16, tokens[t]:i32, slots[h]:i32, starts[h1]:i32, num_prompts[h]:i32")
def count_tokens(
    counts: Tensor, tokens: Tensor, slots: Tensor, starts: Tensor, num_prompts: Tensor
) -> None:
    """Make the rows `slots` of `counts` anew from histories.

    History h is `tokens[starts[h] : starts[h + 1]]`: the prompt, `num_prompts[h]` tokens, then the
    output. A count is how often the output has the token, at most `MAX_COUNT`; bit 15 is set if
    the prompt has it. Slots differ from each other.
    """
    borders = starts.tolist()
    for h, (slot, num_prompt) in enumerate(zip(slots.tolist(), num_prompts.tolist(), strict=True)):
        history = tokens[borders[h] : borders[h + 1]].long()
        output = torch.bincount(history[num_prompt:], minlength=counts.shape[1])
        state = output.clamp(max=MAX_COUNT).to(torch.int16)
        state[history[:num_prompt]] |= _IN_PROMPT
        counts[slot] = state


@functools.cache
def variant_of(source: str, dtype: torch.dtype) -> jit.Variant:
    """Return the instantiation of a kernel that reads `ROW` records."""
    members = (f"{_CUDA[FIELDS[name].kind]} {field};" for field, name in CHOSEN.items())
    return jit.variant(source, dtype, CHOSEN=" ".join(members))


def _variant(dtype: torch.dtype) -> jit.Variant:
    return variant_of("sampling/sample.cu", dtype)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from map(_variant, jit.DTYPES)
    yield jit.variant("sampling/count_tokens.cu")


def check_layout(name: str, logits: Tensor, rows: Tensor, *others: Tensor) -> bool:
    """Return whether a group of tokens of `logits [n, v]` is one access.

    Raises KernelError for what a kernel that reads `ROW` records cannot take; `name` is its own.
    """
    num_tokens = logits.shape[1]
    jit.require(0 < num_tokens < 2**31 - 2**20, f"{name}: {num_tokens} tokens")
    jit.require(logits.stride(1) == 1 or num_tokens == 1, f"{name}: rows must be contiguous")
    is_dense = all(tensor.is_contiguous() for tensor in (rows, *others))
    jit.require(is_dense, f"{name}: all but logits must be contiguous")
    jit.require(rows.data_ptr() % 16 == 0, f"{name}: rows must be aligned to 16 bytes")
    return (
        num_tokens % GROUP == 0
        and logits.stride(0) % GROUP == 0
        and logits.data_ptr() % (GROUP * logits.element_size()) == 0
    )


@sample.cuda
@flattened(SampleCall)
def _sample(call: SampleCall) -> None:
    logits, rows, edits, counts, *_, mirrors = call
    num_rows, num_tokens = logits.shape
    is_aligned = check_layout("sample", logits, rows, edits, counts, *call.results, *mirrors)
    if num_rows == 0:
        return
    jit.launch(
        _variant(logits.dtype),
        "sample",
        (num_rows * team.team_size(logits.get_device()),),
        team.THREADS,
        *(
            logits,
            logits.stride(0),
            num_tokens,
            int(is_aligned),
            rows,
            edits,
            counts,
            *call.results,
        ),
        *([mirror.data_ptr() for mirror in mirrors] or (0, 0, 0)),
        overlaps=True,
    )


@count_tokens.cuda
def _count_tokens(
    counts: Tensor, tokens: Tensor, slots: Tensor, starts: Tensor, num_prompts: Tensor
) -> None:
    arrays = (counts, tokens, slots, starts, num_prompts)
    jit.require(all(a.is_contiguous() for a in arrays), "count_tokens: arrays must be contiguous")
    if len(slots) > 0:
        num_tokens = counts.shape[1]
        args = (counts, num_tokens, *arrays[1:])
        variant = jit.variant("sampling/count_tokens.cu")
        jit.launch(variant, "count_tokens", (len(slots),), 1024, *args, overlaps=True)
