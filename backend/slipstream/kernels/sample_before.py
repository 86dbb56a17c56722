"""From logits to one token a row, without a sort on the GPU.

A row's random numbers are Philox4x32-10 (Salmon et al., 2011) of (seed, output number, token id),
so a sequence draws the same tokens whatever else is in the batch. The draw is the Gumbel-max trick:
the argmax of `logit / temperature + gumbel` over the kept tokens samples their softmax.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels import jit
from slipstream.kernels.op import op

_MASK32 = 0xFFFFFFFF


def _mul32(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low halves of a 32 x 32 bit product, in int64 without overflow."""
    low = (a & 0xFFFF) * m
    high = (a >> 16) * m + (low >> 16)
    return (high >> 16) & _MASK32, ((high & 0xFFFF) << 16 | (low & 0xFFFF)) & _MASK32


def philox(seeds: Tensor, counters: Tensor, num_tokens: int) -> Tensor:
    """32 random bits for each (row, token id), `[rows, num_tokens]` int64.

    Key: the seed's low and high words. Counter: (token id // 4, output number, 0, 0), of whose four
    words this is number token id % 4.
    """
    rows = len(seeds)
    quads = -(-num_tokens // 4)
    key0, key1 = (seeds & _MASK32)[:, None], ((seeds >> 32) & _MASK32)[:, None]
    c0 = torch.arange(quads, device=seeds.device).expand(rows, quads)
    c1 = (counters[:, None] & _MASK32).expand(rows, quads)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        hi0, lo0 = _mul32(c0, 0xD2511F53)
        hi1, lo1 = _mul32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ key0, lo1, hi0 ^ c3 ^ key1, lo0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :num_tokens]


def _gumbel(bits: Tensor) -> Tensor:
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23  # exact in fp32, never 0 or 1
    return -torch.log(-torch.log(uniform))


def _keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens to draw from: top k, of those the smallest set of mass p, of those min p. Ties stay.

    Each of the three keeps a prefix of the ranking, so the shortest prefix's last logit decides.
    """
    if not bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        return torch.ones_like(scaled, dtype=torch.bool)
    order = scaled.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k, scaled.shape[-1]).clamp(max=scaled.shape[-1]).long()
    kth = order.gather(-1, (k - 1)[:, None])
    # In double: the borders of 128k additions should not hang on their order.
    ranked = torch.where(order >= kth, order, float("-inf")).double().softmax(-1)
    before = ranked.cumsum(-1) - ranked  # the mass of likelier tokens
    kept = (before < top_p[:, None]) | (top_p >= 1)[:, None]  # rounding cuts no tail of a whole
    kept &= (ranked >= min_p[:, None] * ranked[:, :1]) & (order >= kth)
    num_kept = kept.cumprod(-1).sum(-1, keepdim=True).clamp(min=1)
    return scaled >= order.gather(-1, num_kept - 1)


@op(
    "logits[n,v]:f32, temperature[n]:f32, top_k[n]:i32, top_p[n]:f32, min_p[n]:f32, "
    "seeds[n]:i64, counters[n]:i64"
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(token_ids [n] i64, log_probs [n] f32, is_finite [n] bool)`.

    Temperature 0, or so near it that logits / temperature overflow, is greedy (the lowest id of
    equal logits). `log_probs` are of the chosen token under the softmax of `logits` as given. A row
    with a NaN or +inf, or with nothing but -inf, is not finite; its token means nothing.
    """
    highest = logits.amax(-1)  # NaN if any is
    is_finite = highest.isfinite()
    greedy = (temperature == 0) | ~(highest / temperature).isfinite()
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    scores = scaled
    if not bool(greedy.all()):
        keep = _keep(scaled, top_k, top_p, min_p)
        drawn = scaled + _gumbel(philox(seeds, counters, logits.shape[-1]))
        drawn = torch.where(keep, drawn, float("-inf"))
        scores = torch.where(greedy[:, None], scaled, drawn)
    token_ids = scores.argmax(-1)
    log_probs = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return token_ids, log_probs, is_finite


@op("logits[n,v]:f32, rows[e]:i64, token_ids[e]:i64, factors[e]:f32, addends[e]:f32")
def edit_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, factors: Tensor, addends: Tensor
) -> None:
    """In place: `l = (l / factor if l > 0 else l * factor) + addend`; a (row, token) once."""
    picked = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(picked > 0, picked / factors, picked * factors) + addends


def _variant() -> jit.Variant:
    return jit.variant("sample_before.cu")


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    yield _variant()


@sample.cuda
def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_tokens = logits.shape
    jit.require(0 < num_tokens < 2**31, f"sample: {num_tokens} tokens")
    jit.require(logits.stride(1) == 1 or num_tokens == 1, "sample: rows must be contiguous")
    parameters = (temperature, top_k, top_p, min_p, seeds, counters)
    jit.require(all(p.is_contiguous() for p in parameters), "sample: parameters must be contiguous")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows > 0:
        strided = (logits, logits.stride(0), num_tokens)
        results = (token_ids, log_probs, is_finite)
        jit.launch(_variant(), "sample", (num_rows,), 1024, *strided, *parameters, *results)
    return token_ids, log_probs, is_finite


@edit_logits.cuda
def _edit_logits(
    logits: Tensor, rows: Tensor, token_ids: Tensor, factors: Tensor, addends: Tensor
) -> None:
    edits = (rows, token_ids, factors, addends)
    jit.require(
        logits.stride(1) == 1 or logits.shape[1] == 1, "edit_logits: rows must be contiguous"
    )
    jit.require(all(e.is_contiguous() for e in edits), "edit_logits: edits must be contiguous")
    if len(rows) > 0:
        grid = (-(-len(rows) // 256),)
        strided = (logits, logits.stride(0))
        jit.launch(_variant(), "edit_logits", grid, 256, *strided, *edits, len(rows))
