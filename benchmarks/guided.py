"""Try JSON schemas on the default model: `python benchmarks/guided.py FOLDER` (a CPU will do).

FOLDER has schemas, one a `.json` file, as JSONSchemaBench's do: the file is a schema, or an object
with its `schema` (perhaps as a text). Each is compiled; each that is accepted guides one output,
sampled at a temperature of 1, which must be a value of the schema by the package `jsonschema`.
Prints JSON: how many were accepted, refused (by the library's words), unfinished within
`--max-tokens`, and invalid (their names; there must be none).
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import exceptions, validators
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.guide.checkpoint import start_set_up
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes

CHECKPOINT = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/checkpoint"
_AT_A_TIME = 16


def read(path: Path) -> Any:
    """Return the schema of a file."""
    value = json.loads(path.read_text())
    if isinstance(value, dict) and "schema" in value and "type" not in value:
        value = value["schema"]
    return json.loads(value) if isinstance(value, str) else value


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


def why(message: str) -> str:
    """Return a refusal without what is in one schema alone."""
    text = message.removeprefix("the guide is refused: ")
    return re.sub(r"'[^']*'|\d+", "_", text)[:90]


def main() -> int:
    """Try a folder of schemas; return 1 if an output is invalid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    paths = sorted(options.folder.rglob("*.json"))
    trial, counts, refused, invalid = (
        Trial(options.max_tokens, options.seed),
        Counter(),
        Counter(),
        [],
    )
    started = time.monotonic()
    for start in range(0, len(paths), _AT_A_TIME):
        some = paths[start : start + _AT_A_TIME]
        schemas = [read(path) for path in some]
        for path, schema, (ending, text) in zip(some, schemas, trial.run(schemas), strict=True):
            counts[ending] += 1
            if ending == "refused":
                refused[why(text)] += 1
            elif ending in ("stop", "end") and not is_valid(text, schema):
                invalid.append(path.name)
    num_accepted = len(paths) - counts["refused"]
    print(
        json.dumps(
            {
                "schemas": len(paths),
                "accepted": num_accepted,
                "accepted_share": round(num_accepted / max(1, len(paths)), 4),
                "endings": dict(counts),
                "refused_by": dict(refused.most_common()),
                "invalid": invalid,
                "seconds": round(time.monotonic() - started, 1),
            },
            indent=1,
        )
    )
    return 1 if invalid else 0


if __name__ == "__main__":
    sys.exit(main())
