"""Checkpoints in other layouts: names without a prefix, wrong sizes, heads with zeros."""

from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import (
    FAMILIES,
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    random_prompts,
    rewrite,
    save,
)
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.check import check_tensors
from slipstream.models.files import tensor_entries
from slipstream.models.hf import read_config
from slipstream.models.padding import with_heads_of
from slipstream.models.weights import FileSource
from slipstream.runner.cache_dtype import model_on
from slipstream.runner.plan import resolve
from torch import Tensor

SIZES = (16, 48, 64)


def logits_of(directory: Path, **options: object) -> Tensor:
    """Logits of a prompt in chunks, and of two tokens behind it, `[3, vocab]`."""
    generation = Generation(random_prompts([30], 300)[0], 3)
    Driver(make_runner(directory, **options), keep_logits=True).finish([generation], 11)
    return torch.stack(generation.logits)


def renamed(old: str, new: str) -> object:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith(old):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def test_names_may_lack_a_prefix_and_files_may_hold_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPT-2's published files do; a tensor that is no mask is still refused."""
    monkeypatch.setattr(FileSource, "mapped", lambda *_: None)  # its last bits are others
    save(make_model("gpt2"), tmp_path)
    before = logits_of(tmp_path)
    rewrite(tmp_path, renamed("transformer.", ""))
    rewrite(tmp_path, lambda t: t.update({"h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    check_tensors(tmp_path)
    assert torch.equal(logits_of(tmp_path), before)
    rewrite(tmp_path, lambda t: t.update({"h.0.attn.biases": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.biases .* has no place"):
        check_tensors(tmp_path)


def without_head(family: str, directory: Path, *, is_tied: bool) -> torch.nn.Module:
    """Write the files of transformers' class below the one with a head; return the latter."""
    model = make_model(family, tie_word_embeddings=is_tied, vocab_size=300)
    save(model.base_model, directory)
    edit_config(directory, architectures=[type(model).__name__])
    return model


@pytest.mark.parametrize("family", quick_of(["qwen3", "falcon", "mpt"], {"qwen3"}))
def test_files_of_a_class_without_a_head(family: str, tmp_path: Path) -> None:
    save(without_head(family, tmp_path / "base", is_tied=True), tmp_path / "whole")
    assert not any(name.startswith("model.") for name in tensor_entries(tmp_path / "base"))
    assert torch.equal(logits_of(tmp_path / "base"), logits_of(tmp_path / "whole"))


# Heads of these have a bias, and Llama 4's class below is the same.
TIED = sorted({*FAMILIES} - {"codegen", "gptj", "phi", "llama4"})


@pytest.mark.parametrize("family", quick_of(TIED, {"gpt_neox"}))
def test_files_without_a_head_are_read_where_it_is_tied(family: str, tmp_path: Path) -> None:
    """A head that no file has is missing, where transformers would make up numbers."""
    without_head(family, tmp_path, is_tied=True)
    check_tensors(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tensor (lm_head|embed_out)\.weight is missing"):
        check_tensors(tmp_path)


@pytest.mark.parametrize("family", quick_of(TIED, {"falcon", "gpt2", "llama"}))
def test_the_class_without_a_head_may_be_named(family: str, tmp_path: Path) -> None:
    """As in files of embedding models: served where embeddings are tied, else the head is named."""
    model = without_head(family, tmp_path, is_tied=True)
    expected = read_config(tmp_path)
    edit_config(tmp_path, architectures=[type(model.base_model).__name__])
    assert read_config(tmp_path).architecture == expected.architecture
    check_tensors(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    said = r"\.weight is missing: there is no head, as in .* tie_word_embeddings is not true"
    with pytest.raises(CheckpointError, match=said):
        check_tensors(tmp_path)


def test_a_missing_bias_of_a_head_is_said_to_be_one(tmp_path: Path) -> None:
    save(make_model("phi"), tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.bias"))
    with pytest.raises(CheckpointError, match=r"bias is missing: the head of this architecture"):
        check_tensors(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"bias is missing: there is no head, and the head"):
        check_tensors(tmp_path)


def test_files_of_two_ways_to_name_are_refused(tmp_path: Path) -> None:
    """Where one name has a prefix, the others must have it."""
    without_head("qwen3", tmp_path, is_tied=True)
    rewrite(tmp_path, renamed("norm.", "model.norm."))
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight is missing"):
        check_tensors(tmp_path)


@pytest.mark.parametrize("add", [1, -1])
def test_a_joined_matrix_of_another_size_is_refused(add: int, tmp_path: Path) -> None:
    """All rows are read: one too many is as wrong as one too few."""
    save(make_model("gpt_neox"), tmp_path)
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(384 + add, 128)}))
    with pytest.raises(CheckpointError, match=rf"query_key_value.weight is \[{384 + add}, 128\]"):
        check_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=rf"query_key_value.weight is \[{384 + add}, 128\]"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gpt2", {"n_embd": 72}),
        ("gpt_neox", {"hidden_size": 80, "num_attention_heads": 2}),
        ("qwen2", {"head_dim": 36, "num_key_value_heads": 1}),
        ("mistral", {"head_dim": 18, "sliding_window": 9}),
        ("stablelm", {"hidden_size": 160, "qk_layernorm": True, "use_parallel_residual": True}),
        ("phi", {"hidden_size": 160, "qk_layernorm": True}),
        ("qwen3", {"head_dim": 36}),
        ("gemma3", {"head_dim": 36}),
    ],
)
def test_padded_heads_compute_the_same(
    family: str, overrides: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layout, partly rotated ones too, and in a cache of 8 bits."""
    save(make_model(family, **overrides), tmp_path)
    size = read_config(tmp_path).dims.head_size
    before, rounded = logits_of(tmp_path), logits_of(tmp_path, kv_cache_dtype="int8", block_size=16)
    monkeypatch.setattr(
        "slipstream.runner.plan.model_on", lambda device, model: with_heads_of(model, SIZES)
    )
    padded = min(each for each in SIZES if each >= size)
    after = logits_of(tmp_path)
    assert (after - before).abs().max() <= 1e-4
    assert (logits_of(tmp_path, kv_cache_dtype="int8", block_size=16) - rounded).abs().max() <= 0.2
    assert padded > size


def test_which_heads_are_padded(tmp_path: Path) -> None:
    save(make_model("qwen2", head_dim=112), tmp_path)
    model = read_config(tmp_path)
    assert model_on("cuda", model).dims.head_size == 128
    assert model_on("cuda", model).axes.attention_scale == 112**-0.5
    assert model_on("cpu", model) is model
    save(make_model("stablelm", hidden_size=640, qk_layernorm=True), tmp_path / "norms")
    model = read_config(tmp_path / "norms")
    assert (model.dims.head_size, model_on("cuda", model).dims.head_size) == (160, 256)
    assert model_on("cuda", model).axes.normed_size == 160
    edit_config(tmp_path, head_dim=128)
    assert model_on("cuda", read_config(tmp_path)).dims.head_size == 128
    edit_config(tmp_path, head_dim=320)
    assert model_on("cuda", read_config(tmp_path)).dims.head_size == 320  # refused by attention


def test_names_of_a_key_that_contradict_each_other(tmp_path: Path) -> None:
    save(make_model("gpt2"), tmp_path)
    edit_config(tmp_path, hidden_size=128)
    assert read_config(tmp_path).dims.hidden_size == 128
    edit_config(tmp_path, hidden_size=64)
    with pytest.raises(CheckpointError, match=r"hidden_size = .* contradicts n_embd = 128"):
        read_config(tmp_path)
    edit_config(tmp_path, "hidden_size", n_embd=0)
    with pytest.raises(CheckpointError, match="n_embd = 0 is not a whole number"):
        read_config(tmp_path)
    edit_config(tmp_path, n_embd=128, intermediate_size=5, num_key_value_heads=1)
    config = read_config(tmp_path)  # keys that GPT-2 calls otherwise, or does not have
    assert {"intermediate_size", "num_key_value_heads"} <= set(config.ignored)
    assert (config.dims.intermediate_size, config.dims.num_kv_heads) == (177, 4)


def test_what_other_layouts_do_not_go_with(tmp_path: Path) -> None:
    save(make_model("gpt2"), tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has a table of positions"):
        resolve(EngineConfig(checkpoint=str(tmp_path), device="cpu", attention_window=8))
