"""Follow instances of JSON schemas by the guide library alone: verdicts, and the time of each mask.

`read` takes what JSONSchemaBench and MaskBench have: a file of a schema, or of an object with its
`schema` (or `json_schema`, perhaps as a text) and `tests`, each with `data` and whether it is
`valid`. A `.jsonl` file has such an object in each line.
"""

import ctypes
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.guide.interface import GuideCompiler, GuideError
from slipstream_contract.guide import Guide, GuideKind
from tokenizers import Tokenizer

_KEYS = ("schema", "json_schema")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|-?\d+(\.\d+)?""")


@dataclass(frozen=True)
class Case:
    """A schema, and values that are of it or are not."""

    name: str
    schema: Any
    tests: list[tuple[Any, bool]] = field(default_factory=list)


@dataclass
class Times:
    """Seconds of first masks, compiling included, and of all others."""

    first: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


def read(path: Path) -> Iterator[Case]:
    """Yield the cases of a file, or of all files in a folder."""
    if path.is_dir():
        for each in sorted(file for end in ("json", "jsonl") for file in path.rglob(f"*.{end}")):
            yield from read(each)
        return
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for number, line in enumerate(filter(None, lines)):
        name = path.stem if len(lines) == 1 else f"{path.stem}:{number}"
        yield _case(name, json.loads(line))


def _case(name: str, value: Any) -> Case:
    key = next((each for each in _KEYS if isinstance(value, dict) and each in value), None)
    if key is None or ("type" in value and "tests" not in value):
        return Case(name, value)
    schema = json.loads(value[key]) if isinstance(value[key], str) else value[key]
    tests = [(test["data"], bool(test["valid"])) for test in value.get("tests", [])]
    return Case(str(value.get("name", name)), schema, tests)


def judge(
    compiler: GuideCompiler, tokenizer: Tokenizer, case: Case, times: Times
) -> list[bool] | str:
    """Return whether each of a case's values is allowed; a text: why its schema is refused."""
    start = time.perf_counter()
    try:
        template = compiler.compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(case.schema)))
    except GuideError as error:
        return str(error)
    times.first.append(time.perf_counter() - start)
    mask = ctypes.create_string_buffer(compiler.num_mask_bytes)
    verdicts = []
    for value, _ in case.tests:
        place, is_legal = template.matcher.copy(), True
        text = json.dumps(value, ensure_ascii=False)
        for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
            start = time.perf_counter()
            (error,) = compiler.fill_all([place], ctypes.addressof(mask))
            times.others.append(time.perf_counter() - start)
            is_allowed = mask.raw[token_id >> 3] >> (token_id & 7) & 1
            is_legal = not error and bool(is_allowed) and place.take(token_id)
            if not is_legal:
                break
        verdicts.append(is_legal and place.is_accepting)
    return verdicts


def spread(seconds: list[float], unit: float) -> dict[str, float]:
    """Return quantiles of times in a unit of so many seconds."""
    if not seconds:
        return {}
    ordered, last = sorted(seconds), len(seconds) - 1
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(last * q)] / unit, 3) for name, q in shares.items()}


def keyword_of(message: str) -> str:
    """Return a refusal by its keyword: the list of those not served, or the library's words."""
    if (found := re.search(r"keywords that are not served: \[(.*?)\]", message)) is not None:
        return found[1].replace('"', "")
    return _QUOTED.sub("_", message)[:90]
