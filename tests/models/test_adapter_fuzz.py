"""Whatever an adapter's directory holds, it is served or refused by name: drawn, not chosen."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slipstream.errors import CheckpointError
from slipstream.models.adapters.config import _HARMLESS, _OF_PROMPTS, _READ
from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapters import Adapters
from slipstream.runner.model_runner import ModelRunner

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEYS = sorted(_HARMLESS | _READ | _OF_PROMPTS | {"use_qalora", "layer_replication", "new"})
scalars = st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | st.text(max_size=6)
scalars |= st.sampled_from(
    [2**63, 10**400, 1e308, "LORA", "PROMPT_TUNING", "PREFIX_TUNING", "lm_head", "pissa"]
)
patterns = st.text(st.sampled_from("ab.*+?()[]{}|\\1,q_proj"), max_size=9) | st.just("q_proj")
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(patterns, scalars, max_size=3)
sizes = st.sampled_from([0, 1, 3, 4, 31, 32, 48, 97])
names = st.sampled_from(
    [
        *(f"model.layers.{i}.self_attn.{m}_proj" for i in (0, 7) for m in "qkv"),
        *("model.embed_tokens", "lm_head", "model.norm", "x" * 300, "", "../..", "\0"),
    ]
)
kinds = st.sampled_from(
    [
        *("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "weight"),
        *("lora_magnitude_vector", "lora_B.bias", "base_layer.weight", "lora_C.weight"),
    ]
)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64])
fills = st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e-45, 3e38])
added = st.tuples(names, kinds, st.lists(sizes, max_size=3), dtypes, fills)


@pytest.fixture(scope="module")
def sound(base: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(
        tmp_path_factory.mktemp("adapters") / "sound", draw_pairs(base, targets_of(base), 3), 3
    )


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


def outcome(adapters: Adapters, path: str) -> tuple[AdapterWeights | None, str]:
    """What was read, or why not; any other exception is the bug looked for."""
    try:
        return adapters.read(path), ""
    except CheckpointError as error:
        return None, str(error)


def check(runner: ModelRunner, folder: Path) -> None:
    """Read a directory. What is refused has left nothing, and what is read is served."""
    adapters = runner.adapters
    before = len(adapters._stored), len(adapters._loaded), len(adapters._loads)
    weights, refusal = outcome(adapters, str(folder))
    if weights is None:
        assert refusal.startswith(str(folder)), "by the file's name"
        assert len(refusal) < 1000
        assert (len(adapters._stored), len(adapters._loaded), len(adapters._loads)) == before
        return
    number = adapters.add(weights)
    driver = Driver(runner, keep_logits=True)
    row = Generation([1, 2, 3], 2, adapter=number)
    driver.finish([row])
    assert len(row.logits) == 2
    adapters.remove(number)


@settings(max_examples=150)
@given(data=st.data())
def test_configuration_and_tensors(
    data: st.DataObject, runner: ModelRunner, sound: Path, drawn: Path
) -> None:
    """Some keys have other values, some tensors are missing, others are added or replaced."""
    config = json.loads((sound / CONFIG).read_text())
    config |= data.draw(st.dictionaries(st.sampled_from(KEYS), values, max_size=2))
    tensors = load_file(sound / TENSORS)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2)):
        tensors.pop(name, None)
    for module, kind, shape, dtype, fill in data.draw(st.lists(added, max_size=2)):
        fits = fill if dtype.is_floating_point else 1
        tensors[f"base_model.model.{module}.{kind}"] = torch.full(shape, fits).to(dtype)
    (drawn / CONFIG).write_text(json.dumps(config))
    save_file(tensors, drawn / TENSORS)
    check(runner, drawn)


headers = st.dictionaries(
    names.map("base_model.model.{}.lora_A.weight".format),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F16", "I64", "F8_E4M3", "X", None, 3]),
            "shape": st.lists(st.integers(-1, 40) | st.just(2**70), max_size=3) | scalars,
            "data_offsets": st.lists(st.integers(-1, 4000), max_size=3) | scalars,
        },
    )
    | scalars,
    max_size=3,
)


@settings(max_examples=150)
@given(header=headers | values, data=st.binary(max_size=64), length=st.none() | st.integers(0, 99))
def test_a_header_of_anything(
    header: object, data: bytes, length: int | None, runner: ModelRunner, sound: Path, drawn: Path
) -> None:
    text = json.dumps(header).encode()
    (drawn / CONFIG).write_bytes((sound / CONFIG).read_bytes())
    (drawn / TENSORS).write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data
    )
    check(runner, drawn)


@settings(max_examples=150)
@given(name=st.sampled_from([TENSORS, CONFIG]), data=st.data())
def test_bytes_that_are_cut_and_changed(
    name: str, data: st.DataObject, runner: ModelRunner, sound: Path, drawn: Path
) -> None:
    for each in (TENSORS, CONFIG):
        (drawn / each).write_bytes((sound / each).read_bytes())
    found = bytearray((sound / name).read_bytes())
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4)
    ):
        found[at % len(found)] = value
    cut = data.draw(st.none() | st.integers(0, len(found)))
    (drawn / name).write_bytes(found[:cut])
    check(runner, drawn)
