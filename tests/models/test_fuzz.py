"""Whatever a checkpoint directory holds, reading it gives a checkpoint or one `CheckpointError`."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from fixtures.models.configs import BASE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream.errors import CheckpointError
from slipstream.models.files import tensor_entries
from slipstream.models.hf import describe, read_config
from slipstream.models.model_config import ModelConfig
from slipstream.models.registry import family_of, supported

T = TypeVar("T")
KEYS = [
    *BASE,
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "tie_word_embeddings",
    "hidden_act",
    "dtype",
    "eos_token_id",
    "quantization_config",
]
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"]
ROPE_KEYS += ["beta_fast", "mscale", "mscale_all_dim", "attention_factor", "truncate"]
WORDS = st.sampled_from(["linear", "llama3", "yarn", "dynamic", "default", "silu", "float16"])
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | WORDS | st.text(max_size=5)
)
SCALARS |= st.sampled_from([2**63, 10**400, 1e308, 5e-324])
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=6)
VALUES = SCALARS | ROPES | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS)


def outcome(read: Callable[[Path], T], directory: Path) -> T | str:
    """What it read, or the text of its refusal; any other exception is the bug looked for."""
    try:
        return read(directory)
    except CheckpointError as error:
        return str(error)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=400, deadline=None)
@example(changes={"num_hidden_layers": 2**63})
@example(changes={"num_hidden_layers": 10_001})
@example(changes={"rope_scaling": {"\n": False}})
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_config(directory: Path, changes: dict[str, object]) -> None:
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    result = outcome(read_config, directory)
    assert isinstance(result, ModelConfig) or ("config.json" in result and "\n" not in result)


FAMILIES = supported()


@settings(max_examples=400, deadline=None)
@example(name="DeepseekV3ForCausalLM", number=0, value=2**63)
@given(
    st.sampled_from(FAMILIES), st.integers(0, 999), VALUES | st.lists(SCALARS | ROPES, min_size=9)
)
def test_any_value_of_a_key_that_a_family_has(
    directory: Path, name: str, number: int, value: object
) -> None:
    family = family_of(name)
    keys = sorted(family.keys)
    config = {"architectures": [name], **family.said, keys[number % len(keys)]: value}
    (directory / "config.json").write_text(json.dumps(config))
    result = outcome(read_config, directory)
    assert isinstance(result, ModelConfig) or ("config.json" in result and "\n" not in result)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_count_of_layers_is_checked_before_lists_of_them_are_made(
    name: str, directory: Path
) -> None:
    family = family_of(name)
    key = family.aliases.get("num_hidden_layers", ("num_hidden_layers",))[0]
    config = {"architectures": [name], **family.said, key: 20_000_000}
    (directory / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    assert f"{key} = 20000000 is above 10000" in str(outcome(read_config, directory))
    assert time.process_time() - start < 0.5


HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I4", "", 7]),
            "shape": st.lists(st.integers(-1, 9), max_size=3) | SCALARS,
            "data_offsets": st.lists(st.integers(-1, 200), max_size=3) | SCALARS,
        }
    )
    | SCALARS,
)


@settings(max_examples=400, deadline=None)
@given(
    header=HEADERS.map(lambda h: json.dumps(h).encode()) | st.binary(max_size=40),
    length=st.none() | st.integers(0, 2**64 - 1),
    data=st.binary(max_size=100),
)
def test_any_safetensors(directory: Path, header: bytes, length: int | None, data: bytes) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    result = outcome(tensor_entries, directory)
    if isinstance(result, str):
        assert "model.safetensors" in result
    else:
        for entry in result.values():
            assert 8 <= entry.begin <= entry.end <= path.stat().st_size


@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(max_size=200))
def test_garbage_in_every_file(directory: Path, garbage: bytes) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).write_bytes(garbage)
        result = outcome(describe, directory)
        (directory / name).unlink()
        assert isinstance(result, str)
        assert str(directory) in result
