"""Try JSON schemas on the default model: `python benchmarks/guided.py FOLDER` (a CPU will do).

FOLDER has schemas and instances as JSONSchemaBench's (`guided_masks.read`); without it the sample
of the tests is tried. Each schema is compiled. Of each that is accepted, its instances are
followed, mask by mask: those that are not of the schema must be refused. Then it guides one output,
sampled at a temperature of 1, which must be a value of the schema by the package `jsonschema`.

Prints JSON: how many are accepted, and refused, by keyword; the time of the first mask, compiling
included, and of the others; instances that are judged wrongly; how outputs ended, and those that
are invalid, by name. Fails if anything invalid was allowed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from guided_masks import Case, Times, judge, keyword_of, read, spread
from jsonschema import exceptions, validators
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.guide.checkpoint import start_set_up
from slipstream.guide.interface import GuideCompiler
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/checkpoint"
SAMPLE = Path(__file__).parents[1] / "tests/fixtures/guide/sample.jsonl"
VOCAB_SIZE = 4096
_AT_A_TIME = 16


def make_engine() -> tuple[Engine, TokenBytes, tuple[int, ...]]:
    """Return an engine of the default model, its vocabulary, and its ends."""
    config = EngineConfig(checkpoint=str(CHECKPOINT), kv_cache_tokens=65_536, max_num_seqs=16)
    plan = resolve(config)
    vocab = TokenBytes.load(CHECKPOINT)
    make = start_set_up(CHECKPOINT, plan.model.dims.vocab_size, vocab.raw)
    ends = tuple(make().end_ids)
    return Engine(Limits(16, 512), ModelRunner(plan), vocab, guide_compiler=make), vocab, ends


class Trial:
    """Outputs of schemas, a few at a time."""

    def __init__(self, max_tokens: int, seed: int) -> None:
        self._engine, self._vocab, self._ends = make_engine()
        self._max_tokens = max_tokens
        self._seed = seed

    def run(self, schemas: list[Any]) -> list[tuple[str, str]]:
        """Return what became of each: `refused` and why, or how it ended, and its text."""
        results: dict[int, tuple[str, str]] = {}
        outputs: dict[int, list[int]] = {}
        for number, schema in enumerate(schemas):
            guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
            sampling = SamplingParams(
                max_tokens=self._max_tokens, seed=self._seed, end_ids=self._ends, guide=guide
            )
            try:
                prompt = TokenIds("i", self._ends[:1])
                self._engine.submit(b"b", Submit(number, prompt, sampling, arrival_ns=0))
            except ContractError as error:
                results[number] = ("refused", error.message)
        while self._engine.has_work:
            for tokens in self._engine.step().get(b"b", []):
                outputs.setdefault(tokens.request, []).extend(tokens.token_ids)
                if (end := tokens.finished) is not None:
                    data = b"".join(map(self._vocab.raw, outputs[tokens.request]))
                    text = end.error or data.decode(errors="replace")
                    results[tokens.request] = (str(end.reason), text)
            for _, rejected in self._engine.take_rejected():
                results[rejected.request] = ("refused", rejected.message)
        return [results[number] for number in range(len(schemas))]


def is_valid(text: str, schema: Any) -> bool:
    """Return whether a text is JSON of a schema; a schema that cannot be checked has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    try:
        validators.validator_for(schema)(schema).validate(value)
    except exceptions.ValidationError:
        return False
    except Exception as error:  # the checker refuses the schema itself
        print(f"not checked: {type(error).__name__}", file=sys.stderr)
    return True


def follow(cases: list[Case], compiler: GuideCompiler) -> tuple[list[Case], dict[str, Any]]:
    """Return the accepted cases, and a report of all."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    times, refused, accepted = Times(), Counter(), []
    wrong: dict[bool, list[str]] = {True: [], False: []}  # by whether an instance is valid
    for case in cases:
        verdicts = judge(compiler, tokenizer, case, times)
        if isinstance(verdicts, str):
            refused[keyword_of(verdicts)] += 1
            continue
        accepted.append(case)
        for verdict, (_, is_valid_one) in zip(verdicts, case.tests, strict=True):
            if verdict != is_valid_one:
                wrong[is_valid_one].append(case.name)
    return accepted, {
        "schemas": len(cases),
        "accepted": len(accepted),
        "accepted_share": round(len(accepted) / max(1, len(cases)), 4),
        "refused_by": dict(refused.most_common()),
        "first_mask_ms": spread(times.first, 1e-3),
        "masks": len(times.others),
        "mask_us": spread(times.others, 1e-6),
        "instances": sum(len(case.tests) for case in accepted),
        "valid_refused": wrong[True],
        "invalid_accepted": wrong[False],
    }


def generate(cases: list[Case], max_tokens: int, seed: int) -> dict[str, Any]:
    """Return a report of one output of each case."""
    trial, counts, invalid = Trial(max_tokens, seed), Counter(), []
    for start in range(0, len(cases), _AT_A_TIME):
        some = cases[start : start + _AT_A_TIME]
        results = trial.run([case.schema for case in some])
        for case, (ending, text) in zip(some, results, strict=True):
            counts[ending] += 1
            if ending in ("stop", "end") and not is_valid(text, case.schema):
                invalid.append(case.name)
    return {"outputs": len(cases), "endings": dict(counts), "invalid": invalid}


def main() -> int:
    """Try a folder of schemas; return 1 if anything invalid was allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=SAMPLE)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--outputs", type=int, default=1000, help="schemas that guide an output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="a file for the report")
    options = parser.parse_args()
    started = time.monotonic()
    vocab = TokenBytes.load(CHECKPOINT)
    compiler = start_set_up(CHECKPOINT, VOCAB_SIZE, vocab.raw)()
    accepted, report = follow(list(read(options.folder)), compiler)
    report |= generate(accepted[: options.outputs], options.max_tokens, options.seed)
    report["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(report, indent=1)
    print(text)
    if options.write is not None:
        options.write.write_text(text + "\n")
    return 1 if report["invalid"] or report["invalid_accepted"] else 0


if __name__ == "__main__":
    sys.exit(main())
