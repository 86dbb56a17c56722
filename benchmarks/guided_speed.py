"""Guided beside unguided decoding: `python benchmarks/guided_speed.py` (a GPU, for figures).

Random weights of a shape, the default model's tokenizer or that of `--tokenizer`, `--rows` greedy
streams, first unguided, then guided by ten schemas in turn. Random weights follow no schema, so
that nearly every token needs its mask: the worst case. Then requests with schemas never seen, one
after another. Then plain streams, alone and beside one whose masks take 50 ms each. Prints JSON:
tokens/s of both, their ratio and the share of rows that were late; ms to the first token of a cold
and of a known schema (p50, p99); ms between tokens of the plain streams (p50, p99).
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Outcome, Sampled
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.guide.checkpoint import start_set_up
from slipstream.guide.interface import GuideCompiler, Matcher, Template
from slipstream.runner.launched import LaunchedStep
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes

TOKENIZER = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/checkpoint"


def schema(number: int) -> Guide:
    """Return the guide of a list without end, of objects whose names have a number."""
    names = [f"field_{number}_{i}" for i in range(1 + number % 5)]
    item = {
        "type": "object",
        "properties": {name: {"type": ["string", "integer"]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    text = json.dumps({"type": "array", "items": item, "minItems": 10_000})
    return Guide(GuideKind.JSON_SCHEMA, text)


SLOW_S = 0.05
SLOW = Guide(GuideKind.REGEX, "(slow|[a-z ]){10000}")  # its masks take `SLOW_S` each


class _SlowMatcher:
    """A matcher whose masks take their time, without the interpreter lock."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)

    def fill(self, address: int) -> None:
        """Fill a mask, later."""
        time.sleep(SLOW_S)
        self._matcher.fill(address)

    def copy(self) -> "_SlowMatcher":
        """Return another one."""
        return _SlowMatcher(self._matcher.copy())


class _Compiler:
    """A compiler that makes the masks of `SLOW` slow."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self.num_mask_bytes, self.end_ids = compiler.num_mask_bytes, compiler.end_ids

    def fill_all(self, matchers: Sequence[Matcher], address: int) -> list[str]:
        """Make masks, slow ones one by one."""
        if not any(isinstance(matcher, _SlowMatcher) for matcher in matchers):
            return self._compiler.fill_all(matchers, address)
        for number, matcher in enumerate(matchers):
            matcher.fill(address + number * self.num_mask_bytes)
        return [""] * len(matchers)

    def compile(self, guide: Guide) -> Template:
        """Return a compiled guide."""
        template = self._compiler.compile(guide)
        if guide != SLOW:
            return template
        return dataclasses.replace(template, matcher=_SlowMatcher(template.matcher))


class Bench:
    """An engine, and the numbers of its requests."""

    def __init__(self, shape: str, rows: int, folder: Path, tokenizer: Path) -> None:
        if shape == "default":
            config = EngineConfig(checkpoint=str(TOKENIZER), max_num_seqs=rows)
        else:
            write_config(shape, folder)
            config = EngineConfig(
                checkpoint=str(folder), load_format="random", max_num_seqs=rows, max_model_len=4096
            )
        plan = resolve(config)
        runner = ModelRunner(plan)
        vocab = TokenBytes.load(tokenizer)
        compiler = _Compiler(start_set_up(tokenizer, runner.vocab_size, vocab.raw)())
        self._engine = Engine(Limits(rows, 2048), runner, vocab, guide_compiler=lambda: compiler)
        self._number = self.num_late = 0
        self._launch, runner.launch = runner.launch, self._watched  # type: ignore[method-assign]

    def _watched(self, batch: Batch) -> LaunchedStep:
        """Launch a step whose late rows are counted."""
        step = self._launch(batch)
        wait = step.wait

        def watched() -> Sampled:
            sampled = wait()
            self.num_late += sampled.outcomes.count(Outcome.LATE)
            return sampled

        step.wait = watched  # type: ignore[method-assign]
        return step

    def submit(self, guide: Guide | None, max_tokens: int) -> None:
        """Offer a greedy request."""
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, guide=guide)
        prompt = TokenIds("i", range(self._number % 7 + 1, self._number % 7 + 17))
        self._engine.submit(b"b", Submit(self._number, prompt, sampling, arrival_ns=0))

    def run(self) -> int:
        """Step until all is done; return the number of tokens."""
        count = 0
        while self._engine.has_work:
            for tokens in self._engine.step().get(b"b", []):
                count += len(tokens.token_ids)
                if tokens.finished is not None and tokens.finished.error:
                    raise RuntimeError(tokens.finished.error)
        return count

    def speed(self, guides: list[Guide | None], rows: int, max_tokens: int) -> float:
        """Return tokens/s of so many rows, guided by these in turn."""
        for _ in range(2):  # the first warms up
            for i in range(rows):
                self.submit(guides[i % len(guides)], max_tokens)
            started = time.perf_counter()
            count = self.run()
            seconds = time.perf_counter() - started
        return count / seconds

    def gaps_ms(self, rows: int, max_tokens: int, beside: list[Guide | None]) -> list[float]:
        """Return ms between tokens of plain streams, beside others."""
        for guide in beside:
            self.submit(guide, max_tokens)
        plain = {self._number + 1 + i: 0.0 for i in range(rows)}
        for _ in plain:
            self.submit(None, max_tokens)
        gaps = []
        while self._engine.has_work:
            outputs = self._engine.step().get(b"b", [])
            now = time.perf_counter()
            for number in {tokens.request for tokens in outputs} & plain.keys():
                if plain[number]:
                    gaps.append((now - plain[number]) * 1e3)
                plain[number] = now
            if not any(self._engine.has_request(b"b", number) for number in plain):
                for number in range(self._number + 1):
                    self._engine.cancel(b"b", number)
        return sorted(gaps)

    def first_token_ms(self, guides: list[Guide]) -> list[float]:
        """Return ms until the first token of one request after another."""
        times = []
        for guide in guides:
            started = time.perf_counter()
            self.submit(guide, 1)
            self.run()
            times.append((time.perf_counter() - started) * 1e3)
        return sorted(times)


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="llama-3.1-8b", help="of shapes.py, or default: the default model"
    )
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="of another checkpoint")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cold", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        bench = Bench(options.shape, options.rows, Path(folder), options.tokenizer)
        plain = bench.speed([None], options.rows, options.tokens)
        bench.num_late = 0
        guided = bench.speed([schema(i) for i in range(10)], options.rows, options.tokens)
        late = bench.num_late / (2 * options.rows * options.tokens)
        cold = bench.first_token_ms([schema(100 + i) for i in range(options.cold)])
        known = bench.first_token_ms([schema(i % 10) for i in range(options.cold)])
        alone = bench.gaps_ms(options.rows - 1, options.tokens, [None])
        beside = bench.gaps_ms(options.rows - 1, options.tokens, [SLOW])
    result = {"shape": options.shape, "rows": options.rows}
    result |= {"plain_tok_s": round(plain, 1), "guided_tok_s": round(guided, 1)}
    result |= {"ratio": round(guided / plain, 4), "late_rows_per_token": round(late, 4)}
    times = {"cold_first_token": cold, "known_first_token": known}
    times |= {"gap_alone": alone, "gap_beside_slow_masks": beside}
    for name, values in times.items():
        result[f"{name}_ms_p50"] = round(statistics.median(values), 2)
        result[f"{name}_ms_p99"] = round(values[int(0.99 * (len(values) - 1))], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
