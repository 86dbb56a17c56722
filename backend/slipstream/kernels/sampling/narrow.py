"""Filters of few rows, in front of `sample`: the range of logits that a row keeps.

Whatever a row's filters are, what they keep lies between two logits. `narrow` finds the two and
writes them into the row's record, so that `sample` has one comparison more and the logits stay as
they are. A row without these filters leaves at once.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from slipstream_contract.filters import Filters
from slipstream_contract.sampling import FIELDS
from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op
from slipstream.kernels.runtime.team import THREADS, team_size
from slipstream.kernels.sampling.sample import (
    ROW,
    ROW_WORDS,
    check_layout,
    edited_logits,
    philox_words,
    uniform,
    variant_of,
)

XTC_QUAD = 0xFFFFFFFF  # of random words that no token has
_MOST_CTAS = 128  # as many as run at once
_MOST_XTC = 0.5  # no two tokens are likelier
_CAUSES = [
    name
    for name in Filters.__struct_fields__
    if FIELDS[name].field.is_filter and FIELDS[name].field.device
]


def _heat(logits: Tensor, how: Any) -> float:
    """Return the temperature: it moves with the entropy of `logits [t]`, finite ones in fp64."""
    base, reach = float(how["temperature"]), float(how["dynatemp_range"])
    if reach == 0 or len(logits) < 2:
        return base
    share = _entropy(logits) / math.log(len(logits))
    low, high = max(0.0, base - reach), base + reach
    return float(np.float32(low + (high - low) * share ** float(how["dynatemp_exponent"])))


def _entropy(scaled: Tensor) -> float:
    log_p = scaled.log_softmax(-1)
    return -float((log_p.exp() * log_p).sum())


def _typical(kept: Tensor, mass: float) -> Tensor:
    """Return those of `kept [k]` fp32 whose surprise is nearest to the entropy, of this mass.

    Meister et al., 2022 (arXiv 2202.00666).
    """
    exact = kept.double()
    center = float(exact.logsumexp(-1)) - _entropy(exact)
    distance = (kept - kept.new_tensor(center)).abs()
    order = distance.sort()
    p = exact.softmax(-1)[order.indices]
    is_in = p.cumsum(-1) - p < mass
    farthest = order.values[is_in][-1] if bool(is_in.any()) else order.values[0]
    return kept[distance <= farthest]


def _top_p(kept: Tensor, mass: float) -> Tensor:
    order = kept.sort(descending=True).values
    p = order.double().softmax(-1)
    is_in = p.cumsum(-1) - p < mass
    is_in[0] = True
    return kept[kept >= order[is_in][-1]]


def _at_least(kept: Tensor, probability: float) -> Tensor:
    """Return those of `kept` that are so likely, and the likeliest."""
    if probability <= 0:
        return kept
    exact = kept.double()
    bound = exact.logsumexp(-1) + math.log(probability)
    return kept[exact >= bound.clamp(max=exact.max())]


def _eta(kept: Tensor, eta: float) -> Tensor:
    """Hewitt et al., 2022 (arXiv 2210.15191)."""
    return _at_least(kept, min(eta, math.sqrt(eta) * math.exp(-_entropy(kept.double()))))


def _without_top(kept: Tensor, threshold: float) -> Tensor:
    """Leave out all tokens that are so likely, but the least likely of them."""
    p = kept.double().softmax(-1)
    top = kept[p >= threshold]
    return kept[kept <= top.min()] if len(top) else kept


def _draws_xtc(how: Any) -> bool:
    seed, number = (torch.tensor([int(how[name])]) for name in ("seed", "number"))
    word = philox_words(seed, number, torch.tensor([XTC_QUAD]))[:, 0]
    return float(uniform(word)) < float(how["xtc_probability"])


def _decayed(how: Any) -> float:
    """Return top-p of an output: it decays with each, down to a least one."""
    if how["top_p_decay"] == 1:
        return float(how["top_p"])
    top_p = float(how["top_p"]) * float(how["top_p_decay"]) ** int(how["number"])
    return float(np.float32(max(top_p, float(how["top_p_min"]))))


def _keep(scaled: Tensor, logits: Tensor, how: Any) -> Tensor:
    """Return the tokens that a row keeps, as their `scaled [k]` fp32; logits are not scaled."""
    kept = scaled
    if how["top_n_sigma"] > 0:
        exact = logits.double()
        deviation = exact.std(correction=0)
        kept = kept[exact >= exact.max() - float(how["top_n_sigma"]) * deviation]
    if 0 < how["top_k"] < len(kept):
        kept = kept[kept >= kept.topk(int(how["top_k"])).values[-1]]
    if how["typical_p"] < 1:
        kept = _typical(kept, float(how["typical_p"]))
    if (top_p := _decayed(how)) < 1:
        kept = _top_p(kept, top_p)
    if how["min_p"] > 0:
        exact = kept.double()
        kept = kept[exact >= exact.max() + math.log(float(how["min_p"]))]
    kept = _at_least(kept, float(how["epsilon_cutoff"]))
    if how["eta_cutoff"] > 0:
        kept = _eta(kept, float(how["eta_cutoff"]))
    if how["xtc_threshold"] <= _MOST_XTC and _draws_xtc(how):
        kept = _without_top(kept, float(how["xtc_threshold"]))
    return kept


def _range(logits: Tensor, how: Any) -> tuple[int, float, float, float] | None:
    """Return `likeliest`, `heat`, `low` and `high` of a row, from its edited logits `[v]`.

    None: `sample` refuses it, as not finite.
    """
    highest = float(logits.max())
    if not math.isfinite(highest):
        return None
    finite = logits[logits > -math.inf]
    heat = _heat(finite.double(), how)
    temperature = torch.tensor(heat, dtype=torch.float32)
    if not bool((1 / temperature).isfinite() & (highest / temperature).isfinite()):
        return 1 + int(logits.argmax()), heat, -math.inf, math.inf  # `sample` is greedy
    scaled = logits / temperature.to(logits.device)
    is_finite = scaled > -math.inf
    kept = _keep(scaled[is_finite], logits[is_finite], how)
    low, high = float(kept.min()), float(kept.max())
    return 1 + int((scaled == high).int().argmax()), heat, low, high


@op(f"logits[n,v]:T, rows[n,{ROW_WORDS}]:i32, edits[e,2]:i32, counts[s,v]:i16")
def narrow(logits: Tensor, rows: Tensor, edits: Tensor, counts: Tensor) -> None:
    """Find the range of logits that rows with filters keep: `likeliest`, `heat`, `low`, `high`.

    In this order: edits and penalties, as `sample` has them; the temperature, by the entropy of the
    softmax; then what each filter keeps of what those before it kept: top-n-sigma, top-k,
    typical-p, top-p, min-p, epsilon, eta, XTC. Equal logits stay together. A greedy row is not
    filtered. `top_k`, `top_p` and `min_p` alone are `sample`'s work.

    Args:
        logits: `[n, v]` fp32, fp16 or bf16.
        rows: `ROW` records as words, of which these four fields are written.
        edits: `EDIT` records as words.
        counts: `[slots, v]`, as before `sample`.
    """
    records = rows.cpu().numpy().view(ROW)[:, 0]
    causes = records.view(np.float32).reshape(len(records), ROW_WORDS)[:, _CAUSE_WORDS]
    is_asked = (records["result"] >= 0) & (causes != _NO_CAUSE).any(axis=1)
    for n in np.flatnonzero(is_asked).tolist():
        edited = edited_logits(logits[n : n + 1], rows[n : n + 1], edits, counts)[0]
        found = _range(edited, records[n])
        if found is not None:
            rows[n, _WORDS[0]] = found[0]
            for word, value in zip(_WORDS[1:], found[1:], strict=True):
                rows.view(torch.float32)[n, word] = value


assert ROW.fields is not None
assert all(FIELDS[name].kind is float for name in _CAUSES), "all are read as fp32"
_CAUSE_WORDS = [ROW.fields[name][1] // 4 for name in _CAUSES]
_NO_CAUSE = np.array([FIELDS[name].default for name in _CAUSES], np.float32)
_WORDS = [ROW.fields[name][1] // 4 for name in ("likeliest", "heat", "low", "high")]


@functools.cache
def _variant(dtype: torch.dtype) -> jit.Variant:
    return variant_of("sampling/narrow.cu", dtype)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from map(_variant, jit.DTYPES)


@narrow.cuda
def _narrow(logits: Tensor, rows: Tensor, edits: Tensor, counts: Tensor) -> None:
    num_rows, num_tokens = logits.shape
    is_aligned = check_layout("narrow", logits, rows, edits, counts)
    if num_rows == 0:
        return
    size = team_size(logits.get_device())
    jit.launch(
        _variant(logits.dtype),
        "narrow",
        (min(num_rows, _MOST_CTAS // size) * size,),
        THREADS,
        *(logits, logits.stride(0), num_tokens, int(is_aligned), rows, num_rows, edits, counts),
        overlaps=True,
    )
