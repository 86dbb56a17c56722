"""Each scheme that checkpoints come in, family and feature, pairwise: tokens of the plain path.

The plain path serves the same files with the same formats of the cache, and nothing else: a request
at a time, whole prompts, no reuse, no drafts, blocks enough. Graphs need a GPU (`test_gpu_w4.py`).
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fixtures.features.covering import cover
from fixtures.models import remote_drawn
from fixtures.models.checkpoints import make_model, make_runner, random_prompts, save
from fixtures.models.parity import engine_greedy
from fixtures.models.rearranged import MIXED, W4A8, Of128, write
from fixtures.models.rows_of_gpu import round_rows_as_on_gpu
from fixtures.models.written import OPENAI, quantised
from fixtures.tiers import quick_of
from slipstream.engine.scheduler import Limits

SCHEMES = ("awq-gemm-32", "awq-gemm-128", "gptq-v1-4-32", "gptq-v2-8-64", "gptq-v1-3-64")
SCHEMES += ("modelopt-int4", "modelopt-int8", "modelopt-fp8", "modelopt-nvfp4", "modelopt-mxfp4")
SCHEMES += ("bnb-int8", "bnb-nf4", "bnb-nf4-double", "awq-gemv-32", "gptq-v2-2-32")
SCHEMES += ("ct-pack-4", "ct-int-rows", "ct-float-blocks", "ct-naive-4", "ct-nvfp4", "hf-fp8-float")
ON_GPU = "ct-int-rows, rows in int8"  # which a CPU else leaves as they are
SCHEMES += (W4A8, *MIXED, ON_GPU, OPENAI)
OF_OPENAI = "gpt_oss"  # which has a format of its own
_MOE = {"num_key_value_heads": 1, "intermediate_size": 256}
_TYPES = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 1, "attention_bias": True},
    "qwen3": {"num_key_value_heads": 1},
    "gemma3": {"num_key_value_heads": 1, "sliding_window": 16, "layer_types": _TYPES},
    "phi3": {"num_key_value_heads": 1, "sliding_window": 24},
    "cohere2": {"num_key_value_heads": 1, "sliding_window": 16, "layer_types": _TYPES},
    "gpt2": {"n_inner": 256},
    "gpt_neox": {},
    "bloom": {"hidden_size": 128, "n_head": 2},
    "internlm2": {},
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    OF_OPENAI: {},
}
FEATURES: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "few blocks": {"kv_cache_tokens": 144},
    "lookup": {"speculation": "lookup"},
    "suffix": {"speculation": "suffix"},
    "draft": {"speculation": "draft"},
    "host memory": {"kv_cache_host_bytes": 1 << 20, "kv_cache_tokens": 192},
    "a window with sinks": {"attention_window": 40, "sink_tokens": 4},
    "16 bits": {"quantization": "none"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}
# What changes numbers: the plain path has it, too.
NUMBERS = {"attention_window", "sink_tokens", "quantization", "dtype", "kv_cache_dtype"}
NEVER = [("a window with sinks", each) for each in ("draft", "host memory", "gemma3", "phi3")]
NEVER += [("a window with sinks", each) for each in ("cohere2", "gpt2", "bloom")]
NEVER += [("draft", "phi3")]  # which has no layer of full attention
NEVER += [(scheme, "internlm2") for scheme in MIXED]  # whose files `gguf` has no names for
NEVER += [("a window with sinks", each) for each in (OPENAI, OF_OPENAI)]  # it has both itself
NEVER += [(OPENAI, each) for each in FAMILIES if each != OF_OPENAI]
NEVER += [(each, OF_OPENAI) for each in SCHEMES if each != OPENAI]
KINDS = [{*SCHEMES}, {*FAMILIES}]


def may_meet(first: str, second: str) -> bool:
    """Return whether two can be in one engine."""
    if any({first, second} <= kind for kind in KINDS):
        return False
    own, other = FEATURES.get(first, {}), FEATURES.get(second, {})
    return not {*own} & {*other} and not {(first, second), (second, first)} & {*NEVER}


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return schemes, families and features in which every pair that may meet does."""
    found = []
    for i, each in enumerate(cover([*SCHEMES, *FAMILIES, *FEATURES], may_meet, 4)):
        is_openai = bool({OPENAI, OF_OPENAI} & {*each})
        others = OPENAI if is_openai else SCHEMES[i % (len(SCHEMES) - 1)]
        scheme = next((x for x in each if x in SCHEMES), others)
        family = next((x for x in each if x in FAMILIES), OF_OPENAI if is_openai else "llama")
        found.append((scheme, family, tuple(x for x in each if x in FEATURES)))
    return found


CASES = {
    ", ".join((scheme, family, *rest)): (scheme, family, rest) for scheme, family, rest in cases()
}
QUICK = set(list(CASES)[::60])
PROMPTS = random_prompts([40, 7, 61, 23], 100)
PROMPTS += [PROMPTS[0][:33] + PROMPTS[1], PROMPTS[2][:50] + PROMPTS[3]]  # begin alike


def test_all_pairs_meet() -> None:
    names = [*SCHEMES, *FAMILIES, *FEATURES]
    wanted = {frozenset(pair) for pair in combinations(names, 2) if may_meet(*pair)}
    met = {frozenset(p) for a, b, rest in CASES.values() for p in combinations((a, b, *rest), 2)}
    assert wanted <= met
    assert len(CASES) < len(wanted) / 2


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the checkpoint of a scheme and family."""

    @cache
    def made(scheme: str, family: str) -> Path:
        directory = tmp_path_factory.mktemp("pairs") / "model"
        if scheme == OPENAI:
            return quantised(OPENAI, directory.parent)
        write(family, "ct-int-rows" if scheme == ON_GPU else scheme, FAMILIES[family], directory)
        return directory

    return made


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_pairs(
    case: str,
    directory_of: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All requests at once with the features, in chunks and twice; each alone without."""
    monkeypatch.setattr(remote_drawn, "Sizes", Of128)
    scheme, family, features = CASES[case]
    directory = directory_of(scheme, family)
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 128}
    for name in features:
        options |= FEATURES[name]
    numbers = {k: v for k, v in options.items() if k in NUMBERS | {"block_size", "max_model_len"}}
    if scheme == ON_GPU:
        round_rows_as_on_gpu(monkeypatch)
    if "kv_cache_dtype" in options or "dtype" in options or scheme == ON_GPU:
        # Else a last bit more or less may round to another number.
        numbers["deterministic"] = options["deterministic"] = True
    if options.get("speculation") == "draft":
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        drafter = make_model("llama", num_hidden_layers=1, vocab_size=vocab_size)
        options["draft_checkpoint"] = str(save(drafter, tmp_path))
        if (directory / "tokenizer.json").is_file():  # of GGUF files; a drafter needs the same
            shutil.copy(directory / "tokenizer.json", tmp_path)
    alone = Limits(1, 128, kv_cache_reuse=False)
    expected = [
        engine_greedy(make_runner(directory, **numbers), alone, [prompt])[0] for prompt in PROMPTS
    ]
    found = engine_greedy(make_runner(directory, **options), Limits(4, 37), PROMPTS * 2)
    assert found == expected * 2
