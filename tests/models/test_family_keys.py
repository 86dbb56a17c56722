"""Keys that only some families have: honoured, or refused by key and value."""

import logging
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import edit_config, make_model, save
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels.attention.backend import backend_for
from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Growth
from slipstream.models.hf import read_config
from slipstream.runner.cache_dtype import attention_spec
from slipstream.runner.plan import resolve

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"type": "yarn", "factor": 2.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


def files(family: str, directory: Path, *removed: str, **changes: object) -> Path:
    """A checkpoint of a family, with other keys."""
    save(make_model(family), directory)
    edit_config(directory, *removed, **changes)
    return directory


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("olmo", {"clip_qkv": -1.0}, "clip_qkv = -1.0 is not a number > 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0 is not a number > 0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers = [1] is not a list of 2 numbers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers = [1, 2] has numbers other"),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta = [1.0] is not a list of 2"),
        ("granite_swa", {"layer_rope_theta": [1.0, -1]}, "has what is no number >= 0"),
        (
            "granite_swa",
            {"layer_rope_theta": [1.0, 9], "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "layer_rope_theta = [1.0, 9] has thetas up to 1: yarn needs more",
        ),
        ("mellum", {"mlp_layer_types": ["dense"]}, "is not a list of 2 of dense and sparse"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": YARN},
            "rope_scaling.type = 'yarn' is not implemented",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": -1}},
            "rope_scaling.alpha = -1 is not a number > 0",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk = [1, 2] is not the same number for"),
        ("hunyuan_v1_moe", {"num_experts_per_tok": 3}, "= 3 contradicts moe_topk = 2"),
        ("ministral3", {"rope_scaling": YARN}, "llama_4_scaling_beta = None is no number"),
        (
            "ministral3",
            {"rope_scaling": {"llama_4_scaling_beta": 0.1}},
            "rope_scaling.original_max_position_embeddings is missing",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
            "rope_scaling.alpha = 1e+300 is above 1e+18",
        ),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "is above 262144"),
        ("exaone_moe", {"mlp_layer_types": [["dense"]] * 2}, "is not a list of 2 of dense and"),
        ("qwen3", {"layer_types": [["full_attention"]] * 2}, "has kinds other than full_attention"),
        ("minimax_m2", {"rotary_dim": 10**30}, f"rotary_dim = {10**30} is above 64"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok = 2 is not implemented; 1 is"),
        ("llama4", {"layer_types": [0, 0]}, "is not a list of 2 of chunked_attention and full"),
        ("llama4", {"moe_layers": [True]}, "moe_layers = [True] is not a list of whole numbers"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size = None is not a whole"),
        ("cohere2", {"layer_types": ["full_attention"]}, "is not a list of 2 kinds"),
        ("cohere", {"use_qk_norm": 1}, "use_qk_norm = 1 is neither true nor false"),
        ("cohere", {"layer_norm_eps": 0}, "layer_norm_eps = 0 is not a number > 0"),
        ("glm", {"partial_rotary_factor": 0.01}, "rotates 0 of heads of 64"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act = 'silu' is not implemented"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1 is not a number"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "has not 16 numbers"),
        ("phi3", {"rope_scaling": LONG | {"long_factor": [0.0] * 16}}, "long_factor"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "short_factor = None is not a list"),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_scaling": LONG}, "one factor for each 2"),
        (
            "gpt_neox",
            {"rope_scaling": ROPE, "rotary_pct": 0.25},
            "rope_scaling.partial_rotary_factor = 0.5 contradicts rotary_pct = 0.25",
        ),
        (
            "gpt_neox",
            {"rope_scaling": ROPE, "rotary_emb_base": "x" * 999},
            "rope_scaling.rope_theta = 10000.0 contradicts rotary_emb_base = 'xxx",
        ),
        ("qwen3_moe", {"mlp_only_layers": False}, "mlp_only_layers = False is not a list"),
        ("qwen3_moe", {"mlp_only_layers": {}}, "mlp_only_layers = {} is not a list"),
        ("phimoe", {"rope_scaling": LONG}, "rope_scaling.short_mscale is missing"),
        (
            "phimoe",
            {"rope_scaling": LONG | {"short_mscale": 1.2, "long_mscale": 1.3}},
            "long_mscale = 1.3 is not short_mscale = 1.2",
        ),
    ],
)
def test_refused_by_key_and_value(
    family: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    files(family, tmp_path, "rope_parameters", **changes)
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    assert said in str(error.value)


def test_factors_by_length_are_chosen_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the longest sequence that the start allows, and the log says so; the old name is read."""
    scaling = LONG | {"type": "su"}
    directory = files(
        "phi3", tmp_path, "rope_parameters", rope_scaling=scaling,
        original_max_position_embeddings=64,
    )  # fmt: skip
    rope = read_config(directory).rope
    assert (rope.kind, rope.of_length(64).factors[0], rope.of_length(65).factors[0]) == (
        "longrope",
        1.0,
        2.0,
    )
    settings = {"checkpoint": str(directory), "device": "cpu"}
    for length, name in ((64, "short_factor"), (None, "long_factor")):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            resolve(EngineConfig(**settings, max_model_len=length))
        assert f"all sequences rotate by {name}" in caplog.text
    with pytest.raises(ConfigError, match=r"attention_window = 8: config\.json has factors"):
        resolve(EngineConfig(**settings, attention_window=8))


def test_dynamic_is_the_plain_kind_within_the_context(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    directory = files("llama", tmp_path, "rope_parameters", rope_scaling=scaling)
    config = read_config(directory)
    assert config.rope == RopeConfig()
    assert config.max_positions == 256  # and none beyond


def test_capped_scores_are_refused_in_endless_sequences(tmp_path: Path) -> None:
    model = read_config(files("gemma2", tmp_path, attn_logit_softcapping=50.0))
    config = EngineConfig(checkpoint=str(tmp_path), device="cpu", attention_window=8)
    spec = attention_spec(config, model, torch.device("cpu"), torch.bfloat16, torch.bfloat16)
    said = "attention_window = 8: Gemma2ForCausalLM has capped scores"
    assert said in str(backend_for(spec))


@pytest.mark.parametrize(
    ("inner", "beside", "every"), [(64, 9, 9), (64, None, 64), (None, None, 256)]
)
def test_queries_grow_by_the_context_before_it_was_stretched(
    inner: int | None, beside: int | None, every: int, tmp_path: Path
) -> None:
    """What stands beside the rotation wins, as in transformers; without either it is the whole."""
    rope = YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": inner}
    keys = {"rope_scaling": rope, "original_max_position_embeddings": beside}
    config = read_config(files("ministral3", tmp_path, "rope_parameters", **keys))
    assert config.axes.query_growth == Growth(0.4, every)
    assert config.rope.original_max_positions == every


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"summary_use_proj": False, "summary_type": "mean", "summary_activation": "tanh"}),
        ("gptj", {"summary_first_dropout": 0.0, "summary_proj_to_labels": False}),
        ("mpt", {"emb_pdrop": 0.1, "init_device": "meta"}),
    ],
)
def test_keys_of_training_and_of_classifiers_change_nothing(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    plain = read_config(files(family, tmp_path))
    edit_config(tmp_path, **changes)
    assert read_config(tmp_path) == plain
