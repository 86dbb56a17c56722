"""The refusing reader: what it takes, and the one line it gives for everything else."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.models.checkpoints import FAMILIES, classes, edit_config, make_model, save
from fixtures.models.configs import BASE
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.layers.dims import RopeConfig
from slipstream.models.hf import describe, ignored_keys, read_config
from slipstream.models.registry import family_of
from slipstream.models.ropes import STILL
from slipstream.runner.plan import resolve
from transformers import AutoConfig

MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 32}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0}


def write(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "architectures = ['T5For"),
        ({"architectures": None}, "architectures = None"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures ="),
        ({"model_type": "mistral"}, "model_type = 'mistral' is not that of this architecture"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({"is_causal": False}, "is_causal = False"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config = "),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types ="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method = "),
        (MISTRAL | {"sliding_window": 0}, "sliding_window = 0"),
        (MISTRAL | {"layer_types": ["sliding_attention"]}, "is not a list of 2 kinds"),
        (MISTRAL | {"layer_types": ["full_attention", "chunked"]}, "has kinds other than"),
        (QWEN | {"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers = -1"),
        (QWEN | {"layer_types": ["sliding_attention"] * 2}, "but no sliding_window is in use"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (GEMMA | {"rope_local_base_freq": -1.0}, "rope_local_base_freq = -1.0"),
        (GEMMA | {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta = 1000000"),
        (
            GEMMA | {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
            "rope_parameters.full_attention.rope_type = 'proportional'",
        ),
        (
            GEMMA | {"rope_theta": 5.0, "rope_parameters": {"full_attention": {"rope_theta": 6.0}}},
            "contradicts rope_theta = 5.0",
        ),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0}},
            "rope_scaling.type = 'proportional'",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "rope_scaling.rope_type = 'proportional'",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.type = 'linear' contradicts rope_type = 'yarn'",
        ),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24]}},
            "rope_scaling.type = 'mrope' contradicts rope_type = 'default'",
        ),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.type = 3 is not implemented"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling.factor = -2"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "rope_scaling.beta_f"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling.factor = 2.0"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta = 6.0"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "contradicts",
        ),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"vocab_size": "100"}, "vocab_size = '100'"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5"),
        ({"num_hidden_layers": 2**63}, "num_hidden_layers = 9223372036854775808 is above 10000"),
        ({"hidden_size": 2**70}, "hidden_size = 1180591620717411303424 is above 262144"),
        ({"head_dim": 2**33}, "head_dim = 8589934592 is above 262144"),
        ({"num_attention_heads": 2**40}, "num_attention_heads = 1099511627776 is above 262144"),
        ({"vocab_size": 2**62}, "vocab_size = 4611686018427387904 is above 16777216"),
        ({"intermediate_size": 2**63}, "intermediate_size = 9223372036854775808 is above 16777216"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings = 2147483648 is above"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 2**31}},
            "rope_scaling.original_max_position_embeddings = 2147483648 is above 2147483647",
        ),
        ({"rope_scaling": YARN | {"factor": 1e300}}, "gives more than 2147483647 positions"),
        ({"num_attention_heads": 3}, "hidden_size = 128"),
        (
            {"architectures": ["MistralForCausalLM"], "num_attention_heads": 2},
            "num_key_value_heads = 8 by default does not divide 2 attention heads",
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 33}, "head_dim = 33"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"eos_token_id": 100}, "eos_token_id = 100"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id = [1, '2']"),
    ],
)
def test_refused_by_key_and_value(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(write(tmp_path, **changes))
    text = str(caught.value)
    assert words in text
    assert "config.json" in text
    assert "\n" not in text
    assert len(text) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None, "some_future_flag": False, "labels": {}, "names": []},
        {"_name_or_path": "x", "transformers_version": "4.30", "use_cache": False},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 2, "attention_dropout": 0.1, "pretraining_tp": 2},
        {"hidden_act": "swish", "partial_rotary_factor": 1.0, "pad_token_id": -1},
    ],
)
def test_neutral_and_harmless_keys(changes: dict[str, object], tmp_path: Path) -> None:
    assert read_config(write(tmp_path, **changes)).dims.num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0)),
        (MISTRAL, (4096, 4096)),  # as transformers has it where the file is silent
        (MISTRAL | {"sliding_window": None}, (0, 0)),
        (MISTRAL | {"sliding_window": 8}, (8, 8)),
        (QWEN, (0, 0)),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, (0, 32)),
        (GEMMA | {"sliding_window": 8}, (8, 8)),  # the sixth would have full attention
        (GEMMA | {"sliding_window": 8, "sliding_window_pattern": 2}, (8, 0)),
        (GEMMA | {"layer_types": ["full_attention", "sliding_attention"]}, (0, 4096)),
    ],
)
def test_windows(changes: dict[str, object], windows: tuple[int, ...], tmp_path: Path) -> None:
    assert read_config(write(tmp_path, **changes)).windows == windows


def test_a_published_gemma_3(tmp_path: Path) -> None:
    """The keys of a checkpoint of 2025, which says nothing of tied embeddings."""
    published = {
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 168,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    config = read_config(write(tmp_path, **GEMMA | published))
    assert config.windows == tuple(0 if i % 6 == 5 else 512 for i in range(26))
    assert config.ropes[5] == RopeConfig("linear", 1e6, 8.0)
    assert config.ropes[0] == RopeConfig(theta=1e4)
    assert config.axes.attention_scale == 168**-0.5
    assert config.ties_embeddings
    assert config.dims.head_size == 256


ROPES = [
    ({}, RopeConfig()),
    ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
    ({"type": "linear", "factor": 2}, RopeConfig("linear", factor=2.0)),
    (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        RopeConfig("llama3", 5e5, 8.0, 128, 1.0, 4.0),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False},
        RopeConfig("yarn", 1e4, 4.0, 512, attention_factor=1.5, truncate=False),
    ),
]


@pytest.mark.parametrize(("rope", "expected"), ROPES)
def test_old_and_new_rope_keys(
    rope: dict[str, object], expected: RopeConfig, tmp_path: Path
) -> None:
    assert read_config(write(tmp_path, rope_parameters=rope)).rope == expected
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    old = {"rope_theta": rope.get("rope_theta", 1e4), "rope_scaling": scaling or None}
    assert read_config(write(tmp_path, **old)).rope == expected
    renamed = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    assert read_config(write(tmp_path, **old | {"rope_scaling": renamed})).rope == expected


@pytest.mark.parametrize("inside", [128, None])
@pytest.mark.parametrize("beside", [256, None])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_context_before_scaling_is_read_where_transformers_reads_it(
    family: str, beside: int | None, inside: int | None, tmp_path: Path
) -> None:
    model = make_model(family)
    save(model, tmp_path)
    given = {"original_max_position_embeddings": inside} if inside else {}
    changes: dict[str, object] = {"original_max_position_embeddings": beside} if beside else {}
    if family == "gemma3":
        changes["layer_types"] = ["full_attention"] * model.config.num_hidden_layers
    edit_config(tmp_path, "rope_parameters", rope_scaling=YARN | given, rope_theta=1e4, **changes)
    theirs = classes(family)[1](AutoConfig.from_pretrained(tmp_path)).config.rope_parameters
    config = read_config(tmp_path)
    found = theirs.get("full_attention", theirs)["original_max_position_embeddings"]
    assert config.rope.original_max_positions == found
    is_unread = family == "gemma3" and beside is not None
    assert ("original_max_position_embeddings" in config.ignored) == is_unread


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    rope = YARN | {"original_max_position_embeddings": 512}
    assert read_config(write(tmp_path, rope_scaling=rope)).max_positions == 2048


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_what_transformers_wrote(family: str, tmp_path: Path) -> None:
    info = describe(save(make_model(family), tmp_path))
    assert info.vocab_size == 1009
    assert info.max_positions == (2048 if family == "bloom" else 256)  # which has no such key
    assert info.dtype == "float32"
    assert info.eos_ids == (2,)
    assert not info.has_tokenizer
    (tmp_path / "tokenizer.json").write_text("{}")
    assert describe(str(tmp_path)).has_tokenizer


def test_eos_of_generation_config_wins(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=3)
    assert read_config(tmp_path).eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9, 7]}')
    assert read_config(tmp_path).eos_ids == (7, 9)


def test_dtype_from_the_weights_when_config_is_silent(tmp_path: Path) -> None:
    save(make_model("llama").bfloat16(), tmp_path)
    edit_config(tmp_path, "dtype", "torch_dtype")
    assert describe(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, "\xff", '"x"'])
def test_broken_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_directory_and_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        describe(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json: not a Hugging Face"):
        describe(tmp_path)


def test_an_error_says_what_to_name_in_the_place_of_a_path(tmp_path: Path) -> None:
    weights, model = tmp_path / "model.safetensors", tmp_path / "b.Q4_1.gguf"
    weights.touch()
    with pytest.raises(CheckpointError, match=f"is a file; name its directory, {tmp_path}, or"):
        describe(weights)
    model.touch()
    with pytest.raises(CheckpointError, match=r"is a file; `slipstream compose` makes"):
        describe(model)
    with pytest.raises(CheckpointError, match=r"no config\.json; name the GGUF .* b.Q4_1.gguf$"):
        describe(tmp_path)
    with pytest.raises(CheckpointError, match=r"^org/name: no such directory; nothing is downlo"):
        describe(Path("org/name"))


UNREAD = {
    "auto_map": {"AutoModelForCausalLM": "evil.Model"},
    "unk_token_id": 0,
    "model_max_length": 4096,
    "use_flash_attention": True,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 7,
    "hidden_activation": "gelu",
    "num_experts": 8,
    "not an identifier\n": 1,
}


def test_keys_that_transformers_does_not_read_are_named(tmp_path: Path) -> None:
    """They change nothing, though some are read of other architectures; code is never run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    plain = read_config(write(tmp_path))
    config = read_config(write(tmp_path, **UNREAD, rope_scaling={"type": "default", "x": 1}))
    line = ignored_keys(config)
    assert line == (
        "config.json: ignored, as by transformers' LlamaForCausalLM: auto_map, unk_token_id, "
        "model_max_length, use_flash_attention, attn_logit_softcapping, query_pre_attn_scalar, "
        "hidden_activation, num_experts, 'not an identifier\\n', rope_scaling.x"
    )
    assert replace(config, ignored=()) == plain
    assert ignored_keys(plain) == ""
    many = read_config(write(tmp_path, **{f"key_{i}": i for i in range(40)}))
    assert ignored_keys(many).endswith("key_31 and 8 more")


def test_keys_are_named_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(make_model("qwen2"), tmp_path)
    edit_config(tmp_path, mask_token_id=3)
    resolve(EngineConfig(checkpoint=str(tmp_path), device="cpu"))
    assert caplog.text.count("mask_token_id") == 1


# What MLPs have, where experts have the usual key.
INNER = {"llama4": "intermediate_size_mlp", "granitemoehybrid": "shared_intermediate_size"}
OTHERWISE = {"falcon": 1, "gpt_bigcode": 1}  # heads of keys and values where no key says


@pytest.mark.parametrize("family", FAMILIES)
def test_a_silent_file_is_what_transformers_takes(family: str, tmp_path: Path) -> None:
    config_class, model_class = classes(family)
    said = family_of(model_class.__name__).said
    file = {"architectures": [model_class.__name__], **said}
    (tmp_path / "config.json").write_text(json.dumps(file))
    ours, theirs = read_config(tmp_path), config_class(**said)
    dims = ours.dims
    inner = INNER.get(family, "intermediate_size")
    for value, key, otherwise in (
        (dims.vocab_size, "vocab_size", None),
        (dims.hidden_size, "hidden_size", None),
        (dims.intermediate_size, inner, 4 * dims.hidden_size),
        (dims.num_layers, "num_hidden_layers", None),
        (dims.num_heads, "num_attention_heads", None),
        (dims.num_kv_heads, "num_key_value_heads", OTHERWISE.get(family, dims.num_heads)),
        (dims.head_size, "head_dim", dims.hidden_size // dims.num_heads),
        (dims.eps, "rms_norm_eps", 1e-5),
        (ours.max_positions, "max_position_embeddings", 2048),
    ):
        if ours.axes.latent and key in ("num_key_value_heads", "head_dim"):
            continue  # the cache has latents
        names = (*family_of(model_class.__name__).aliases.get(key, ()), key)
        found = [getattr(theirs, name, None) for name in names]
        assert value == next((each for each in found if each is not None), otherwise), key
    assert ours.ties_embeddings == theirs.tie_word_embeddings
    eos = [] if theirs.eos_token_id is None else theirs.eos_token_id
    eos = eos if isinstance(eos, list) else [eos]
    assert ours.eos_ids == tuple(i for i in eos if i < dims.vocab_size)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * dims.num_layers
    window = getattr(theirs, "sliding_window", None) or 0
    if family == "gpt_neo":
        named = {"local": "sliding_attention"}
        kinds, window = [named.get(kind) for kind in theirs.attention_layers], theirs.window_size
    if ours.axes.chunked:
        kinds = [kind.replace("chunked", "sliding") for kind in kinds]
        window = theirs.attention_chunk_size
    assert ours.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    ropes = getattr(theirs, "rope_parameters", None)
    if ropes is None:
        assert {rope.rotated for rope in ours.ropes} == {getattr(theirs, "rotary_dim", 0)}
        return
    thetas = [ropes.get(kind, ropes)["rope_theta"] for kind in kinds]
    for rope, theta in zip(ours.ropes, thetas, strict=True):
        assert rope.theta == theta or rope == STILL


def test_the_default_end_only_where_nothing_says_otherwise(tmp_path: Path) -> None:
    assert read_config(write(tmp_path)).eos_ids == (2,)
    assert read_config(write(tmp_path, eos_token_id=None)).eos_ids == ()
    assert read_config(write(tmp_path, vocab_size=2)).eos_ids == ()
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(write(tmp_path)).eos_ids == ()


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from slipstream.models import registry, hf; "
        f"hf.read_config(__import__('pathlib').Path({str(write(tmp_path))!r})); "
        "assert registry.supported(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
