"""What weights in fewer bits cost: `make accuracy`, or `python benchmarks/accuracy.py`.

Each model is quantised in memory by each recipe of `slipstream quantize`, activations rounded as
the recipe says, and measured with the KV cache in each format: bits a byte of held-out text (with
the standard error of the difference, over its pieces; with a cache in fewer bits four pieces), KL
of the next token to the model in 16 bits with its own cache, 1,000 greedy tokens, and 281 questions
of MMLU, which only the model's own cache answers. Each row goes into
`benchmarks/results/accuracy.json` when it is done, each figure with its commit. `--resume` keeps
what is there and measures what a row lacks, with `--again` all of a row; the table goes into
docs/quantization.md. Exits with 1 where a goal is missed.

Products are computed in fp32 on a CPU; on a GPU in 16 bits.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accuracy_metrics import (
    GREEDY,
    KL_PIECES,
    PIECE,
    PROMPT,
    PROMPTS,
    Truth,
    agreement,
    answers,
    bits_and_kl,
    greedy,
    text_of,
)
from accuracy_models import Model, Question, model_of, questions
from accuracy_table import missed, write_table
from quality import ROOT
from report import commit
from slipstream.models.gguf.unpack import as_directory
from slipstream_quantize.job import Job
from slipstream_quantize.make import recipe_of
from slipstream_quantize.measure import num_bytes
from slipstream_quantize.opened import Opened
from slipstream_quantize.recipe import LENGTH, ROWS_AUTO, ROWS_NONE, Recipe
from slipstream_quantize.rows16 import rows16_of
from slipstream_quantize.text import default_texts, pieces, tokenizer_of

RESULT = ROOT / "benchmarks/results/accuracy.json"
BASE, PLAIN = "16 bits", "int4-plain"  # the model as it is; ranges that hold all weights
AT_LOAD = "w8a8"  # int8-sq without its scales, as `--quantization w8a8` rounds
ROWS16 = "-rows16"  # behind a scheme: with `--rows16 auto`
ROWS = (BASE, "int8", AT_LOAD, "int8-sq", "fp8", "fp8-gptq", f"fp8-gptq{ROWS16}", "fp8-block")
ROWS = (*ROWS, PLAIN, "int4", "awq", "gptq", "awq-gptq", "w4a8", "nvfp4")
CACHES = ("auto", "fp8", "int8", "int4")
ALL = ("default", "smollm2", "gemma")


def recipe_for(opened: Opened, row: str) -> Recipe:
    """Return the recipe of a row, with the groups that fit the model."""
    if row == PLAIN:
        return replace(recipe_of(opened, "int4", None, False), clips=False)
    if row == AT_LOAD:
        return replace(recipe_of(opened, "int8", None, False), activations="int8")
    return recipe_of(opened, row.removesuffix(ROWS16), None, False)


class Bench:
    """Measures a model: once in 16 bits, then row by row."""

    def __init__(self, model: Model, args: argparse.Namespace, folder: Path) -> None:
        self.model, self.args, self.folder = model, args, folder
        self.commit = commit()
        self.tokenizer = tokenizer_of(folder)
        self.questions: list[Question] = []
        if model.has_questions and args.questions:
            self.questions = questions()[: args.questions]
        opened = self._opened()
        text = text_of(self.tokenizer, model.texts(), self._length(opened), args.pieces)
        prompts = text_of(self.tokenizer, model.texts(), PROMPT, PROMPTS)
        bits, _, kept = bits_and_kl(opened, text, "auto", None)
        self.truth = Truth(
            text,
            num_bytes(self.tokenizer, text),
            kept,
            bits,
            greedy(opened, prompts, GREEDY),
            answers(opened, self.tokenizer, self.questions),
        )

    def _opened(self) -> Opened:
        gc.collect()  # a decoder refers to itself: the last row's would be there beside this one's
        return Opened(self.folder, self.args.device)

    def _length(self, opened: Opened) -> int:
        return min(PIECE, opened.plan.max_model_len // 2)

    def lacks(self, row: str, found: dict[str, Any]) -> bool:
        """Return whether a row has not all that was asked for."""
        asked = self.questions and row in self.args.question_rows
        caches = found.get("caches", {})
        return any(cache not in caches for cache in self.args.caches) or (
            bool(asked) and "mmlu" not in found
        )

    def measure(self, row: str, found: dict[str, Any]) -> dict[str, Any]:
        """Quantise, and measure with each cache what `found` has not."""
        start, opened = time.process_time(), self._opened()
        about: dict[str, Any] = {}
        if row != BASE:
            recipe = recipe_for(opened, row)
            text = None
            if recipe.needs_text:
                most, length = self.args.samples, min(LENGTH, opened.plan.max_model_len)
                text = pieces(self.tokenizer, default_texts(False), length, most, "the text")
            asked = [ROWS_AUTO if row.endswith(ROWS16) else ROWS_NONE]
            rows16 = rows16_of(opened, row, recipe, asked, text)
            Job(opened, recipe, text, rows16=rows16.names).run()
            about = {"rows16": rows16.measured} if rows16.names else {}
            about |= {
                "group": recipe.group,
                "calibration_tokens": 0 if text is None else text.numel(),
            }
        about["processor_seconds"] = round(time.process_time() - start, 1)
        known = found.get("caches", {})
        caches = [cache for cache in self.args.caches if cache not in known]
        about["caches"] = known | {cache: self._with(opened, cache) for cache in caches}
        if "mmlu" in found:
            about["mmlu"] = found["mmlu"]
        elif self.questions and row in self.args.question_rows:
            own = self.truth.answers
            if row != BASE:
                own = answers(opened, self.tokenizer, self.questions)
            about["mmlu"] = self._mmlu(own)
        return about

    def _with(self, opened: Opened, cache: str) -> dict[str, Any]:
        truth = self.truth
        text = truth.text if cache == "auto" else truth.text[:KL_PIECES]
        bits, kl, _ = bits_and_kl(opened, text, cache, truth.sums)
        same, first = agreement(opened, truth.written, cache)
        before = truth.bits[: len(bits)]
        whole = sum(before)
        differences = [b - a for a, b in zip(before, bits, strict=True)]
        error = statistics.stdev(differences) * len(bits) ** 0.5 / whole if len(bits) > 1 else 0.0
        assert kl is not None, "the sums of the model in 16 bits are there"
        return {
            "bits_per_byte": sum(bits) / num_bytes(self.tokenizer, text),
            "more": sum(bits) / whole - 1,
            "more_error": error,
            "greedy_same": same,
            "greedy_first": first,
            "kl": kl,
            "commit": self.commit,
        }

    def _mmlu(self, own: list[int]) -> dict[str, Any]:
        count = len(own)
        right = [a == q.answer for a, q in zip(own, self.questions, strict=True)]
        before = [a == q.answer for a, q in zip(self.truth.answers, self.questions, strict=True)]
        change = [int(b) - int(a) for a, b in zip(before, right, strict=True)]
        return {
            "questions": count,
            "right": sum(right) / count,
            "right_error": (sum(right) * (count - sum(right)) / count**3) ** 0.5,
            "change": sum(change) / count,
            "change_error": statistics.pstdev(change) / count**0.5,
            "changed": sum(a != b for a, b in zip(own, self.truth.answers, strict=True)) / count,
            "commit": self.commit,
        }


def result_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results so far, empty without `--resume`."""
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": args.device,
        "pieces": args.pieces,
        "piece_tokens": PIECE,
        "samples": args.samples,
    }
    if not args.resume or not RESULT.is_file():
        return {"about": about, "models": {}}
    found: dict[str, Any] = json.loads(RESULT.read_text())
    for key in ("device", "pieces", "samples"):
        if found["about"][key] != about[key]:
            raise SystemExit(f"--resume: {RESULT} has {key} = {found['about'][key]}")
    return {"about": about, "models": found["models"]}


def run(name: str, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure the rows of a model that the result lacks; with `--again` all that are asked for."""
    model = model_of(name)
    entry = result["models"].setdefault(name, {"note": model.note, "rows": {}})
    entry["goal_w4"] = model.goal_w4
    with ExitStack() as stack:
        folder, _ = stack.enter_context(as_directory(model.path))
        bench = Bench(model, args, folder)
        known = {} if args.again else entry["rows"]
        left = [row for row in args.rows if bench.lacks(row, known.get(row, {}))]
        entry["tokens"], entry["bytes"] = bench.truth.text.numel(), bench.truth.num_bytes
        for row in left:
            found = entry["rows"] | {row: bench.measure(row, known.get(row, {}))}
            entry["rows"] = {row: found[row] for row in ROWS if row in found}
            print(json.dumps({name: {row: entry["rows"][row]}}), flush=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    parser.add_argument("--pieces", type=int, default=24, help=f"of {PIECE} held-out tokens")
    parser.add_argument("--samples", type=int, default=32, help=f"of {LENGTH} calibration tokens")
    parser.add_argument("--questions", type=int, default=281, help="at most; 0: none")
    parser.add_argument("--question-rows", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true", help="keep what the result has")
    parser.add_argument("--again", action="store_true", help="but not of --rows: all of them anew")
    parser.add_argument("--table", action="store_true", help="only write the table")
    args = parser.parse_args()
    result = result_of(args) if not args.table else json.loads(RESULT.read_text())
    for name in () if args.table else args.models:
        run(name, args, result)
    print(write_table(result))
    if lines := missed(result):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
