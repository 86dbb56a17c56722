"""What a KV cache in fewer bits costs: `make kv-accuracy`, or `python benchmarks/kv_accuracy.py`.

Bits that the default model needs for a byte of the modules that it has not seen (quality.py), and
the error of attention against fp64 over random keys and values, and over such as have channels of
outliers. Writes the table into docs/quantization.md and the figures beside the other results; exits
with 1 where a format costs more than its limit.
"""

import argparse
import json
import platform
import sys

import torch
from quality import CHECKPOINT, ROOT, bits_per_byte, heldout
from report import commit
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.cache import kv_format

PAGE, RESULT = ROOT / "docs" / "quantization.md", ROOT / "benchmarks/results/kv-accuracy.json"
BEGIN, END = "<!-- table: make kv-accuracy -->", "<!-- end of table -->"
LIMITS = {"fp8": 0.002, "int8": 0.002, "int4": 0.02}  # of the bits per byte, at most so much more
HEADS, KV_HEADS, HEAD_SIZE, TOKENS, BLOCK = 32, 8, 128, 1024, 32
OUTLIERS, TIMES = 4, 20  # channels of a key's head that are so many times as large


def attention_error(name: str, has_outliers: bool) -> float:
    """Measure decode attention's error in float16, as a part of the exact result (both RMS)."""
    generator = torch.Generator().manual_seed(0)
    numbers = {"generator": generator, "dtype": torch.float64}
    k, v = torch.randn((2, TOKENS, KV_HEADS, HEAD_SIZE), **numbers).unbind()
    q = torch.randn((1, HEADS, HEAD_SIZE), **numbers)
    if has_outliers:
        k[..., :OUTLIERS] *= TIMES
    k, v, q = (x.half() for x in (k, v, q))
    dtype = kv_format.FORMATS.get(name, torch.float16)
    row = kv_format.row_size(dtype, HEAD_SIZE)
    cache = torch.zeros((TOKENS // BLOCK, KV_HEADS, 2, BLOCK, row), dtype=dtype)
    kv_format.write(cache, torch.arange(TOKENS), k, v)
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    table = torch.arange(TOKENS // BLOCK, dtype=torch.int32)[None]
    scale = HEAD_SIZE**-0.5 / (TIMES if has_outliers else 1)  # else the softmax sees one token
    plan = plan_decode(lengths, cache, HEADS)
    got = decode_attention(q, cache, table, lengths, plan, scale)[0].double()
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    weights = (q.double()[0, :, None] @ k.transpose(1, 2) * scale).softmax(-1)
    exact = (weights @ v)[:, 0]
    return float((got - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def measure(dtype: str) -> list[dict[str, object]]:
    """A row for each format, the first of them the cache in the activations' own."""
    texts = [path.read_text() for path in heldout()]
    rows: list[dict[str, object]] = []
    base = None
    for name in ("auto", *kv_format.FORMATS):
        bits = bits_per_byte(CHECKPOINT, texts, "none", dtype, "cpu", name)
        base = base or bits
        cache = kv_format.FORMATS.get(name, torch.float16)
        rows.append(
            {
                "format": dtype if name == "auto" else name,
                "bits_per_byte": bits,
                "more": bits / base - 1,
                "limit": LIMITS.get(name),
                "error_random": attention_error(name, has_outliers=False),
                "error_outliers": attention_error(name, has_outliers=True),
                "tokens_that_fit": [
                    2 * size / (kv_format.row_size(cache, size) * cache.itemsize)
                    for size in (64, HEAD_SIZE)
                ],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Format the rows as markdown."""
    lines = [
        "| cache | tokens that fit (heads of 64, 128) | bits a byte | | at most | error, "
        "random | with outliers |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        fit = " / ".join(f"{times:.2f}" for times in r["tokens_that_fit"])  # type: ignore[attr-defined]
        limit = "" if r["limit"] is None else f"{r['limit']:+.1%}"
        more = "" if r["limit"] is None else f"{r['more']:+.2%}"
        errors = f"{r['error_random']:.4f} | {r['error_outliers']:.4f}"
        bits = f"{r['bits_per_byte']:.4f} | {more} | {limit}"
        lines.append(f"| {r['format']} | {fit} | {bits} | {errors} |")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", help="of weights and activations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.dtype)
    text = table(rows)
    print(text)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{rest[rest.index(END) :]}")
    about = {"commit": commit(), "torch": torch.__version__, "machine": platform.machine()}
    RESULT.write_text(json.dumps({**about, "dtype": args.dtype, "rows": rows}, indent=1) + "\n")
    if any(r["limit"] is not None and r["more"] > r["limit"] for r in rows):  # type: ignore[operator]
        sys.exit("a format costs more than its limit")


if __name__ == "__main__":
    main()
