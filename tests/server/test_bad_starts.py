"""Checkpoints and configurations that cannot be served: one line, exit code 1, in seconds.

Every way a checkpoint can be broken is told apart in tests/models/test_weights.py; here, of each
kind one goes through `slipstream serve`, to its exit code and its one line.
"""

import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.server.serve_process import Serve
from safetensors.torch import load_file, save_file
from slipstream_serve.server import repository_root, server_directory

pytestmark = [
    pytest.mark.triton,
    pytest.mark.beside,
    pytest.mark.rest,
    pytest.mark.skipif(not server_directory().is_dir(), reason="no tritonserver: make install"),
]
REPOSITORY = repository_root() / "model_repository"
Q = "model.layers.0.self_attn.q_proj.weight"
HEADER = (
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}'
)
LATEST_S = 120.0  # on a machine that is busy with other things
SOON_S = 30.0  # likewise; alone on two cores, 2.2 to 3.9 s were measured


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPOSITORY, tmp_path / "repository"))


def weights(repository: Path) -> Path:
    return repository / "tensorrt_llm" / "1" / "checkpoint" / "model.safetensors"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def config(**values: object) -> Callable[[Path], None]:
    return lambda repository: change(weights(repository).with_name("config.json"), **values)


def engine(**values: object) -> Callable[[Path], None]:
    def damage(repository: Path) -> None:
        path = repository / "tensorrt_llm" / "1" / "model.json"
        settings = json.loads(path.read_text())
        change(path, engine=settings["engine"] | values)

    return damage


def raw(data: bytes) -> Callable[[Path], object]:
    return lambda repository: weights(repository).write_bytes(data)


def tensor(value: torch.Tensor | None) -> Callable[[Path], None]:
    """Another one in the place of a query projection; None takes it away."""

    def damage(repository: Path) -> None:
        tensors = load_file(weights(repository))
        tensors.pop(Q)
        if value is not None:
            tensors[Q] = value
        save_file(tensors, weights(repository))

    return damage


def poisoned(repository: Path) -> None:
    tensors = load_file(weights(repository))
    tensors[Q][3, 4] = float("nan")
    save_file(tensors, weights(repository))


def only_a_pickle(repository: Path) -> None:
    weights(repository).rename(weights(repository).with_name("pytorch_model.bin"))


def without_a_shard(repository: Path) -> None:
    index = {"weight_map": {Q: "model-00001-of-00002.safetensors"}}
    weights(repository).with_name("model.safetensors.index.json").write_text(json.dumps(index))
    weights(repository).unlink()


# What is done -> what the one line must name.
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (
        lambda repository: os.truncate(weights(repository), 1000),
        ("model.safetensors", "truncated"),
    ),
    "overlapping tensors": (
        raw(struct.pack("<Q", len(HEADER)) + HEADER + bytes(64)),
        ("model.safetensors", "overlap"),
    ),
    "a header of 2^63 bytes": (
        raw(struct.pack("<Q", 2**63) + bytes(64)),
        ("model.safetensors", str(2**63)),
    ),
    "another shape": (tensor(torch.zeros(3, 3)), (Q, "[3, 3]")),
    "another type": (tensor(torch.zeros(256, 256, dtype=torch.int8)), (Q, "I8")),
    "a tensor missing": (tensor(None), (Q, "missing")),
    "NaN": (poisoned, (Q, "NaN")),
    "a shard missing": (without_a_shard, ("model-00001-of-00002.safetensors",)),
    "a head that is neither tied nor there": (
        config(tie_word_embeddings=False),
        ("lm_head.weight", "missing"),
    ),
    "an unknown architecture": (config(architectures=["NobodysForCausalLM"]), ("Nobodys",)),
    "a key that is not implemented": (config(is_causal=False), ("is_causal = False",)),
    "an unknown quantization": (
        config(quantization_config={"quant_method": "zz"}),
        ("quantization_config",),
    ),
    "only a pickle": (only_a_pickle, ("pytorch_model.bin", "safetensors")),
    "a KV cache below one block": (engine(kv_cache_tokens=8), ("kv_cache_tokens", "8")),
    "a context above the checkpoint's": (engine(max_model_len=9999), ("max_model_len", "9999")),
    "an unknown key": (engine(max_nun_seqs=5), ("max_nun_seqs",)),
    "a wrong type": (engine(max_num_seqs="many"), ("max_num_seqs",)),
    "a GPU that is not there": (engine(device="cuda:9"), ("cuda",)),
}
USUAL = ("truncated", "an unknown key", "a GPU that is not there")


def one_line(serve: Serve) -> tuple[str, float]:
    """What it said on its error stream, and after how many seconds it ended."""
    begin = time.monotonic()
    _, errors = serve.process.communicate(timeout=LATEST_S)
    seconds = time.monotonic() - begin
    assert serve.process.returncode == 1
    assert errors.count("\n") == 1, errors
    assert errors.startswith("slipstream: ")
    assert "Traceback" not in errors
    serve.assert_gone()
    return errors, seconds


def check(repository: Path, scratch: Path, fault: str) -> float:
    damage, words = FAULTS[fault]
    damage(repository)
    said, seconds = one_line(Serve(repository, scratch))
    assert all(word in said for word in words), said
    return seconds


@pytest.mark.parametrize("fault", USUAL)
def test_what_cannot_be_served_is_one_line(repository: Path, scratch: Path, fault: str) -> None:
    check(repository, scratch, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(set(FAULTS) - set(USUAL)))
def test_the_rest_too_and_soon(repository: Path, scratch: Path, fault: str) -> None:
    assert check(repository, scratch, fault) < SOON_S


def test_a_port_in_use_is_named(scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said, _ = one_line(Serve(REPOSITORY, scratch, "--grpc-port", port))
    assert f"port {port} " in said
    assert "--grpc-port" in said
