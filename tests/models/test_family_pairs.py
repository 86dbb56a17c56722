"""Families of every shape with every two features: the text of the plain path, or a refusal.

The plain path has the same numbers (formats of weights and cache, an attention window), and nothing
else: a request at a time, no reuse, no drafts, whole prompts, blocks enough.
"""

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.bridge.texts import CHECKPOINT
from fixtures.features import answers
from fixtures.features.covering import cover
from fixtures.features.house import House
from fixtures.features.table import PROMPT, body_of
from fixtures.models.checkpoints import make_model, save
from fixtures.models.parity import GRID
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.runner.plan import settle

Options = Mapping[str, Any]

SHAPES = {  # by a name of the grid, whose models are small
    "gpt2": "learned positions, layer norms",
    "opt": "learned positions from row 2 on",
    "gpt_neox": "parallel, two norms",
    "cohere": "parallel, one norm, logits scaled",
    "cohere2": "windows, and layers that do not rotate",
    "glm4": "norms before and behind",
    "phi3": "a window in every layer",
    "phimoe": "experts by a sparse mixer",
    "gpt-oss": "experts with biases, sinks, windows",
    "qwen2 moe, dense layers": "experts, one of all rows",
    "olmoe": "many experts",
    "hunyuan": "heads normalised behind their rotation",
    "ministral 3": "queries that grow with their position",
}
NUMBERS: dict[str, Options] = {  # what changes tokens: the plain path has it, too
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "fp8 weights": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "endless": {"attention_window": 24, "sink_tokens": 2},
}
SERVING: dict[str, Options] = {  # what changes none
    "deterministic": {"deterministic": True},
    "few blocks": {"kv_cache_tokens": 192},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "lookup": {"speculation": "lookup"},
    "draft": {"speculation": "draft"},  # of another family
    "own draft": {"speculation": "draft"},  # the model itself, so that drafts are accepted
    "host": {"kv_cache_host_bytes": 1 << 20},
}
FORMATS = {"quantization", "kv_cache_dtype"}
FEATURES = NUMBERS | SERVING
OPTIONS = {"block_size": 16, "dtype": "float32", "kv_cache_tokens": 1024, "max_model_len": 96}
DRAFTER = "gqa"
IDS = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}  # of the tokenizer
# Alone, where a family has not what it takes; the words of the refusal.
TABLE, WINDOWS = "has a table of positions", "has windows of its own"
REFUSED = {
    ("gpt2", "endless"): TABLE,
    ("opt", "endless"): TABLE,
    ("cohere2", "endless"): WINDOWS,
    ("phi3", "endless"): WINDOWS,
    ("phi3", "draft"): "needs a layer of full attention",
    ("phi3", "own draft"): "needs a layer of full attention",
    ("gpt-oss", "endless"): "has sinks in the softmax",
    ("hunyuan", "endless"): "normalises rotated queries and keys",
    ("ministral 3", "endless"): "grow with their position",
}
NEVER = [("endless", "draft"), ("endless", "own draft"), ("endless", "host")]
QUICKLY = ("gpt2",)
REQUESTS = (
    "heated n",
    "greedy beams",
    "greedy json_schema",
    "greedy prompt_log_probs",
    "greedy echo top_log_probs",
    "greedy repetition_penalty min_tokens",
    "greedy ignore_eos",
    "greedy regex log_probs",
)
PROMPTS = (PROMPT, f"{PROMPT * 3}a", f"{PROMPT * 3}b")  # the last two begin alike


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def checkpoint(folder: Path, name: str) -> Path:
    """Write a model of random weights, with the tokenizer of the default checkpoint."""
    family, overrides = GRID[name]
    path = folder / name.replace(" ", "-")
    save(make_model(family, **(IDS | overrides)), path)
    shutil.copy(CHECKPOINT / "tokenizer.json", path)
    shutil.copy(CHECKPOINT / "tokenizer_config.json", path)
    return path


def options_of(folder: Path, name: str, features: Iterable[str]) -> dict[str, Any]:
    """Return the engine's options of a model with these features."""
    options = {**OPTIONS, "checkpoint": str(checkpoint(folder, name))}
    for feature in features:
        options |= FEATURES[feature]
    if options.get("speculation") == "draft":
        drafter = name if "own draft" in features else DRAFTER
        options["draft_checkpoint"] = str(checkpoint(folder, drafter))
    if FORMATS & {*options}:  # where a last bit more or less may end in another step of the format
        options["deterministic"] = True
    return options


def may_meet(first: str, second: str) -> bool:
    """Return whether no setting has two values, and the start refuses the two of no family."""
    is_other = not {*FEATURES[first]} & {*FEATURES[second]}
    return is_other and not {(first, second), (second, first)} & {*NEVER}


def sets_of(name: str) -> list[tuple[str, ...]]:
    """Return sets of features in which all meet that may."""
    return list(cover([each for each in FEATURES if (name, each) not in REFUSED], may_meet, 4))


ALONE = [(name, (each,)) for name, each in REFUSED]
TOGETHER = [("glm4", pair) for pair in NEVER]
CASES = {  # every sixteenth set of a family, from another place on in each
    f"{name}: {', '.join(case)}": (name, case)
    for i, name in enumerate(SHAPES)
    for case in sets_of(name)[i % 16 :: 16]
}
QUICK = {next(each for each in CASES if each.startswith(f"{name}:")) for name in QUICKLY}


@pytest.mark.parametrize(("name", "features"), [*ALONE, *TOGETHER])
def test_what_a_family_has_not_is_refused_by_name(
    folder: Path, name: str, features: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        settle(EngineConfig(**options_of(folder, name, features)), torch.device("cpu"))
    assert any(key in str(error.value) for each in features for key in FEATURES[each])
    assert REFUSED.get((name, features[0]), "") in str(error.value)


def ask(house: House, prompt: str, names: str) -> tuple[list[str], list[int], list[list[float]]]:
    """Return texts, their numbers of tokens, and log probs, rounded."""
    body = body_of("vllm_model", names.split()) | {"text_input": prompt}
    answer = answers.read("vllm_model", names.split(), house.ask("vllm_model", body))
    return answer.texts, answer.num_tokens, answer.log_probs


@pytest.mark.parametrize("name", quick_of(CASES, QUICK))
def test_pairs(folder: Path, tmp_path: Path, name: str) -> None:
    """All requests at a time with the features, each alone without those that change no token."""
    family, features = CASES[name]
    asked = [(prompt, names) for names in REQUESTS for prompt in PROMPTS]
    numbers = options_of(folder, family, [each for each in features if each in NUMBERS])
    plain = House(tmp_path, **numbers, kv_cache_reuse=False)
    expected = [ask(plain, *each) for each in asked]
    plain.close()
    house = House(tmp_path, **options_of(folder, family, features))
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda each: ask(house, *each), asked))
    house.close()
    house.engine.check_integrity()
    for each, own, other in zip(asked, found, expected, strict=True):
        assert own[:2] == other[:2], each
        for a, b in zip(own[2], other[2], strict=True):
            assert a == pytest.approx(b, abs=1e-3), each
