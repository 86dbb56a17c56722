"""Weights from one file and from shards, in every dtype; each way a checkpoint can be broken."""

import json
import logging
import os
import struct
from pathlib import Path

import pytest
import torch
import transformers
from fixtures.memory import private_bytes
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    rewrite,
    save,
)
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.models.check import check_tensors
from slipstream.models.decoder import build
from slipstream.models.hf import describe, read_config
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve

Q = "model.layers.1.self_attn.q_proj.weight"


def greedy(runner: ModelRunner) -> list[list[int]]:
    generations = [Generation(prompt, 5) for prompt in random_prompts([11, 30])]
    Driver(runner).finish(generations)
    return [g.outputs for g in generations]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(make_model("llama", hidden_size=64, attention_bias=True), tmp_path / "checkpoint")


def test_shards_equal_the_single_file(checkpoint: Path, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, attention_bias=True)
    sharded = save(model, tmp_path / "sharded", shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert greedy(make_runner(sharded)) == greedy(make_runner(checkpoint))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64).to(dtype)
    low = save(model, tmp_path / "low")
    edit_config(low, "dtype")
    same = save(model.float(), tmp_path / "float32")
    assert greedy(make_runner(low)) == greedy(make_runner(same))


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", -1, 0.3), ("float16", 0.7, 1.5)])
def test_weights_in_the_dtype_of_the_engine_stay_in_their_file(
    dtype: str, least: float, most: float, tmp_path: Path
) -> None:
    """Weights of another dtype are converted, which takes their size in private memory."""
    sizes = {"vocab_size": 4096, "hidden_size": 256}
    model = make_model("llama", intermediate_size=4096, tie_word_embeddings=False, **sizes)
    count = sum(each.numel() for each in model.parameters())
    directory = save(model.to(getattr(torch, dtype)), tmp_path / "checkpoint")
    del model
    source = FileSource(directory, torch.device("cpu"), read_config(directory).tensors)
    weights = Weights(source, torch.device("cpu"), torch.float32, "none")
    before = private_bytes()
    decoder = build(read_config(directory), weights, max_model_len=8)
    grown = private_bytes() - before
    assert least * 4 * count < grown < most * 4 * count, grown / count / 4
    if dtype == "float32":
        assert weights.mapped_bytes > 0.7 * 4 * count
    else:
        assert weights.mapped_bytes == 0
    del decoder


def test_sixteen_bit_computation_on_the_cpu(checkpoint: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        outputs = greedy(make_runner(checkpoint, dtype=dtype))
        assert outputs
        assert all(outputs)
        assert all(0 <= token < 1009 for tokens in outputs for token in tokens)


def test_random_weights_need_only_a_config(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    first = greedy(make_runner(checkpoint, load_format="random"))
    assert first == greedy(make_runner(checkpoint, load_format="random"))
    with pytest.raises(CheckpointError, match="neither"):
        make_runner(checkpoint)


def test_the_time_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_runner(checkpoint)
    assert "GB/s" in caplog.text


def refused(directory: Path, *words: str) -> None:
    """Resolving and loading raises one line with these words in it."""
    with pytest.raises(CheckpointError) as caught:
        ModelRunner(resolve(EngineConfig(checkpoint=str(directory), device="cpu")))
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def refused_unread(directory: Path, *words: str) -> None:
    """Loading raises these words, and so does the check that reads no weights."""
    refused(directory, *words)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(directory)
    for word in words:
        assert word in str(caught.value)


def test_a_good_checkpoint_passes_the_check(checkpoint: Path, tmp_path: Path) -> None:
    check_tensors(checkpoint)
    check_tensors(save(make_model("qwen3", tie_word_embeddings=True), tmp_path / "tied"))


def test_missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(Q))
    refused_unread(checkpoint, Q, "missing")


def test_misshapen_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q: torch.zeros(64, 256)}))
    refused_unread(checkpoint, Q, "[64, 256]", "[256, 64]", "model.safetensors")


def test_leftover_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    refused_unread(checkpoint, "model.extra.weight", "no place")


def test_bias_that_the_config_does_not_mention(checkpoint: Path) -> None:
    edit_config(checkpoint, attention_bias=False)
    refused(checkpoint, "self_attn.k_proj.bias", "no place")


def test_saved_rotary_buffers_are_harmless(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    expected = greedy(make_runner(checkpoint))
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(32)}))
    assert greedy(make_runner(checkpoint)) == expected


@pytest.mark.parametrize("kept", ["both", "one twice", "embedding", "head"])
def test_tied_embeddings_as_transformers_has_them(
    kept: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One matrix under either name or both; two that differ are not tied."""
    edit_config(checkpoint, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kept == "one twice":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if kept in ("embedding", "head"):
            tensors.pop("lm_head.weight" if kept == "embedding" else "model.embed_tokens.weight")

    rewrite(checkpoint, change)
    check_tensors(checkpoint)
    driver = Driver(make_runner(checkpoint), keep_logits=True)
    generation = Generation(random_prompts([30])[0], 1)
    driver.finish([generation])
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        expected = model(torch.tensor([generation.prompt])).logits[0, -1]
    assert (generation.logits[0] - expected).abs().max() <= 1e-4
    assert ("each is used as it is" in caplog.text) == (kept == "both")


def test_a_head_that_is_not_tied_is_needed(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    refused_unread(checkpoint, "lm_head.weight", "missing")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors[Q].__setitem__((3, 4), value))
    refused(checkpoint, Q, "NaN")


def test_values_beyond_the_dtype(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors[Q].__setitem__((3, 4), 1e5))
    make_runner(checkpoint)
    with pytest.raises(CheckpointError, match="float16"):
        make_runner(checkpoint, dtype="float16")


def test_integer_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}))
    refused(checkpoint, Q, "I8")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 1000, -1])
def test_truncated_file(keep: int, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    refused(checkpoint, "model.safetensors", "truncated")
    with pytest.raises(CheckpointError, match="truncated"):
        describe(checkpoint)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"a":3}', "not an object"),
        (b'{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}', "dtype 'F3'"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "shape [-1]"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "offsets [0, 4]"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4]}}', "offsets [4]"),
        (b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}', "4398046511104"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
            "overlap",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "'a' is there more than once",
        ),
    ],
)
def test_damaged_headers(header: bytes, words: str, checkpoint: Path) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    (checkpoint / "model.safetensors").write_bytes(data)
    refused(checkpoint, "model.safetensors", words)


def test_header_of_impossible_length(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(64))
    refused(checkpoint, "model.safetensors", str(2**63))


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_pointer_of_git_lfs_says_what_to_do(name: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (checkpoint / name).write_text(pointer)
    if "-of-" in name:
        index = {"weight_map": {"model.norm.weight": name}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(checkpoint, name, "a pointer of Git LFS in the place of the file: fetch it")


def test_links_without_their_files_are_named(checkpoint: Path, sharded: Path) -> None:
    for directory, name in ((checkpoint, "model.safetensors"), (sharded, None)):
        path = directory / (name or next(sharded.glob("model-0*.safetensors")).name)
        path.unlink()
        path.symlink_to("../../blobs/0123")
        refused(directory, path.name, "is a link to ../../blobs/0123, where no file is")


def test_only_pickles(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80")
    refused(checkpoint, "pytorch_model.bin", "safetensors")
    with pytest.raises(CheckpointError, match="pickled"):
        describe(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "model.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(make_model("llama", hidden_size=64), tmp_path / "sharded", shard="100KB")


def test_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("model-0*.safetensors"))[1]
    gone.unlink()
    refused(sharded, gone.name)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        {"a": 3},
        {"a": ""},
        {"a": "../../etc/passwd"},
        {"a": "model-00001-of-00002.safetensors/"},
    ],
)
def test_damaged_index(weight_map: object, sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    refused(sharded, path.name)


def test_index_that_names_an_absent_tensor(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    refused(sharded, "model.ghost")
