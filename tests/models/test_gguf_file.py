"""Whatever a GGUF file holds, reading it gives a checkpoint or one typed error that names it."""

import json
import struct
from pathlib import Path

import pytest
from fixtures.models.checkpoints import make_model, make_runner, sizes_of
from fixtures.models.configs import BASE
from fixtures.models.gguf_files import LATENT_SIZES, SIZES, unpacked, write_gguf
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.errors import CheckpointError
from slipstream.models.check import check_tensors
from slipstream.models.files import tensor_entries
from slipstream.models.gguf.parts import read_gguf
from slipstream.models.gguf.unpack import as_directory
from slipstream.models.hf import describe
from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", **SIZES)
    return write_gguf(model, "llama", tmp_path_factory.mktemp("gguf") / "model.gguf", "Q4_0")


@pytest.fixture(scope="module")
def data(path: Path) -> bytes:
    return path.read_bytes()


def load(path: Path) -> object:
    """All that compose does with a file that is no server's."""
    with as_directory(path) as (directory, _):
        info = describe(directory)
        check_tensors(directory)
        if (directory / "tokenizer.json").is_file():  # a file need not have one
            load_tokenizer(directory)
            TokenBytes.load(directory)
        return info


def outcome(path: Path) -> object:
    """What it read, or the text of its refusal; any other exception is the bug looked for."""
    try:
        return load(path)
    except (CheckpointError, UnsupportedTokenizerError) as error:
        text = str(error)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_header_is_that_of_gguf(path: Path) -> None:
    file, theirs = read_gguf(path), GGUFReader(path)
    fields = {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert file.metadata.keys() == fields
    for name, value in file.metadata.items():
        assert value == theirs.fields[name].contents(), name
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.begin == tensor.data_offset
        assert ours.end == tensor.data_offset + tensor.n_bytes
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_truncated_anywhere(data: bytes, tmp_path_factory, draw: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("cut") / "cut.gguf"
    size = draw.draw(st.integers(0, 6000) | st.integers(0, len(data) - 1))
    file.write_bytes(data[:size])
    assert isinstance(outcome(file), str)


@settings(max_examples=300, deadline=None)
@given(draw=st.data())
def test_any_bytes_of_the_header_changed(
    data: bytes, path: Path, tmp_path_factory, draw: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("flip") / "flip.gguf"
    changed = bytearray(data)
    end = min(tensor.begin for tensor in read_gguf(path).tensors.values())
    for at in draw.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
        value = draw.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(value)] = value
    file.write_bytes(changed)
    outcome(file)


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=300), is_marked=st.booleans(), count=st.integers(0, 2**64 - 1))
def test_garbage(tmp_path_factory, garbage: bytes, is_marked: bool, count: int) -> None:
    file = tmp_path_factory.mktemp("garbage") / "garbage.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, count, 1) if is_marked else b""
    file.write_bytes(start + garbage)
    assert isinstance(outcome(file), str)


def test_a_pointer_of_git_lfs_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=r"a\.gguf: a pointer of Git LFS in the place of"):
        load(path)


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "keys")])
def test_counts_that_lie(data: bytes, at: int, what: str, tmp_path: Path) -> None:
    """A file is refused by its count alone, not where it ends."""
    file = tmp_path / "lie.gguf"
    file.write_bytes(data[:at] + struct.pack("<Q", 1 << 40) + data[at + 8 :])
    with pytest.raises(CheckpointError, match=rf"truncated or damaged: {1 << 40} {what} in "):
        load(file)


HOSTILE = st.none() | st.booleans() | st.integers(0, 2**32 - 1) | st.text(max_size=4)
HOSTILE |= st.floats(width=32) | st.lists(st.integers(0, 9), max_size=3)
KEYS = [
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "attention.sliding_window",
    "context_length",
    "expert_count",
    "never.heard.of",
]


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), HOSTILE, max_size=3))
def test_any_metadata(tmp_path_factory, changes: dict[str, object]) -> None:
    folder = tmp_path_factory.mktemp("meta")
    model = make_model("llama", **SIZES | {"num_hidden_layers": 1, "intermediate_size": 64})
    keys = {key: value for key, value in changes.items() if value not in (None, [])}
    outcome(write_gguf(model, "llama", folder / "meta.gguf", **keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        (
            {"expert_count": 8, "expert_used_count": 2},
            "tensor model.layers.0.mlp.gate.weight is missing",
        ),
        ({"attention.key_length": 32}, "'llama.attention.value_length' = 64 is not implemented"),
        ({"rope.dimension_count": 32}, "'llama.rope.dimension_count' = 32 is not implemented"),
        ({"rope.scaling.type": "su"}, "'llama.rope.scaling.type' = 'su' is not implemented"),
        ({"block_count": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"block_count": 1}, "has no place in this architecture"),
        ({"vocab_size": 300}, "'llama.vocab_size' = 300 contradicts token_embd.weight of 256 rows"),
        ({"attention.head_count": [4, 2]}, "'llama.attention.head_count' = [4, 2] is not a whole"),
        ({"attention.causal": False}, "'llama.attention.causal' = False is not implemented"),
    ],
)
def test_refused_by_name(keys: dict[str, object], words: str, tmp_path: Path) -> None:
    file = write_gguf(make_model("llama", **SIZES), "llama", tmp_path / "model.gguf", **keys)
    with pytest.raises(CheckpointError) as caught:
        load(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_gating_func": 3}, "'deepseek2.expert_gating_func' = 3 is not implemented; 1 and"),
        ({"attention.key_length": 70}, "'deepseek2.attention.key_length' = 70 is not 80, that of"),
        ({"attention.key_length_mla": 16}, "key_length_mla' = 16 is not above 16 that rotate"),
        ({"expert_group_count": 5}, "n_group = 5 does not divide 12 experts"),
    ],
)
def test_latents_refused_by_name(keys: dict[str, object], words: str, tmp_path: Path) -> None:
    sizes = sizes_of("deepseek_v3", **SIZES) | LATENT_SIZES | {"n_group": 3, "topk_group": 2}
    model = make_model("deepseek_v3", **sizes)
    file = write_gguf(model, "deepseek_v3", tmp_path / "model.gguf", **keys)
    with pytest.raises(CheckpointError) as caught:
        load(file)
    assert words in str(caught.value)


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    keys = {"never_heard_of": 3, "expert_count": 0, "attention.causal": True}
    file = write_gguf(make_model("llama", **SIZES), "llama", tmp_path / "model.gguf", **keys)
    assert load(file).ignored.endswith("LlamaForCausalLM: 'llama.never_heard_of'")


def test_types_that_are_not_served(path: Path, data: bytes, tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at : at + 4] == struct.pack("<I", 2)  # Q4_0
    file = tmp_path / "other.gguf"
    file.write_bytes(data[:at] + struct.pack("<I", 16) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q.weight' is IQ2_XXS, .*; F32, F16, Q4"):
        load(file)


def test_reference_to_a_file_that_changed(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    directory = unpacked(file, tmp_path / "checkpoint")
    assert json.loads((directory / "gguf.json").read_text())["bytes"] == len(data)
    make_runner(directory)
    file.write_bytes(data + b"\0" * 32)
    with pytest.raises(CheckpointError, match=r"gguf.json: bytes = .* run `slipstream compose`"):
        tensor_entries(directory)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model.gguf: no such file"):
        tensor_entries(directory)


def test_values_that_are_not_finite(data: bytes, path: Path, tmp_path: Path) -> None:
    """A scale of infinity in a block is an error at the start, not garbage in texts."""
    begin = read_gguf(path).tensors["blk.1.ffn_up.weight"].begin
    file = tmp_path / "model.gguf"
    file.write_bytes(data[:begin] + b"\x00\x7c" + data[begin + 2 :])
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor model.layers.1.mlp.up_proj"):
        make_runner(unpacked(file, tmp_path / "checkpoint"))


def test_a_file_where_a_directory_belongs(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.gguf: is a file; `slipstream compose` makes"):
        describe(path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "model.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=rf"only GGUF; name the file, {tmp_path}/model.gguf"):
        describe(tmp_path)
