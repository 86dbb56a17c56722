"""Text models of checkpoints that see images, too: the logits of the whole, given texts."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.parity import check_against
from fixtures.models.ranks import compare
from fixtures.tiers import quick_of
from safetensors.torch import load_file, save_file
from slipstream.errors import CheckpointError
from slipstream.models.check import check_tensors
from slipstream.models.hf import ignored_keys, read_config
from slipstream_quantize.opened import Opened

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GROWS = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.3}
GROWS |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
BY_AXES = {"rope_type": "default", "rope_theta": 7e3, "mrope_section": [4, 2, 2]}
CASES: dict[str, tuple[str, dict[str, object]]] = {  # beginning of names of classes, text
    "ministral 3": ("Mistral3", {"model_type": "ministral3", "rope_parameters": GROWS}),
    "mistral small": ("Mistral3", {"model_type": "mistral", "sliding_window": None}),
    "gemma 3": ("Gemma3", {"model_type": "gemma3_text", "sliding_window": 9}),
    "llava": ("Llava", {"model_type": "llama"}),
    "llava next": ("LlavaNext", {"model_type": "mistral", "sliding_window": 12}),
    "llama 4": (
        "Llama4",
        {"model_type": "llama4_text", "intermediate_size_mlp": 72, "num_local_experts": 4}
        | {"attention_chunk_size": 256, "no_rope_layer_interval": 2},
    ),
    "qwen 2 vl": ("Qwen2VL", {"rope_parameters": BY_AXES}),
    "qwen 2.5 vl": ("Qwen2_5_VL", {"rope_parameters": BY_AXES}),
    "qwen 3 vl": ("Qwen3VL", {"rope_parameters": BY_AXES | {"mrope_interleaved": True}}),
}
TOWERS: dict[str, dict[str, object]] = {
    "Qwen2VL": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "Qwen2_5_VL": {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "Qwen3VL": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
}


def make_whole(name: str, ties: bool) -> torch.nn.Module:
    begin, own = CASES[name]
    config_class = getattr(transformers, f"{begin}Config")
    model_class = getattr(transformers, f"{begin}ForConditionalGeneration")
    tower = TOWER | TOWERS.get(begin, {})
    config = config_class(text_config=SIZES | own, vision_config=tower, tie_word_embeddings=ties)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = model_class(config)
        for each in model.parameters():
            scale = each.shape[-1] ** -0.5 if each.ndim > 1 else 0.2
            each.data.normal_(float(each.ndim == 1), scale)
    return model.float().eval()


@pytest.mark.parametrize("ties", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_whole(name: str, ties: bool, tmp_path: Path) -> None:
    """Given a config.json that does not say of embeddings what is the default of the whole."""
    model = make_whole(name, ties)
    save(model, tmp_path)
    if type(model.config)().tie_word_embeddings == ties:
        edit_config(tmp_path, "tie_word_embeddings")
    check_tensors(tmp_path)
    config = read_config(tmp_path)
    assert config.eos_ids == (7,)
    assert "the text model alone is served" in ignored_keys(config)
    assert "vision_config" in config.ignored
    generations = [Generation(prompt, 5) for prompt in random_prompts([60, 1, 9], 211)]
    Driver(make_runner(tmp_path), keep_logits=True).finish(generations, chunk=13)
    for generation in generations:
        check_against(model, generation, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_tied_where_the_class_of_the_whole_has_them_tied(
    name: str, tmp_path: Path
) -> None:
    """Which hears the text model's own keys or does not."""
    begin, own = CASES[name]
    key = "tie_word_embeddings"
    said: list[dict[str, object]] = [{}, {key: False}, {key: True}]
    for whole, text in itertools.product(said, repeat=2):
        keys = {"architectures": [f"{begin}ForConditionalGeneration"], **whole}
        keys["text_config"] = SIZES | own | text
        (tmp_path / "config.json").write_text(json.dumps(keys))
        theirs = getattr(transformers, f"{begin}Config").from_pretrained(tmp_path)
        ours = read_config(tmp_path)
        assert ours.ties_embeddings == theirs.tie_word_embeddings, (whole, text)
        is_ignored = text.get(key, ours.ties_embeddings) != ours.ties_embeddings
        assert (f"text_config.{key}" in ours.ignored) == is_ignored
    edit_config(tmp_path, tie_word_embeddings="yes")
    with pytest.raises(CheckpointError, match=r"json: tie_word_embeddings = 'yes' is neither"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["mistral small", "gemma 3"])
def test_a_head_of_its_own_is_used_where_embeddings_are_tied_by_default(
    name: str, tmp_path: Path
) -> None:
    """As in transformers: Mistral Small 3.1 is published so."""
    model = make_whole(name, ties=False)
    save(model, tmp_path)
    edit_config(tmp_path, "tie_word_embeddings")
    generation = Generation(random_prompts([9], 211)[0], 3)
    Driver(make_runner(tmp_path), keep_logits=True).finish([generation])
    check_against(model, generation, 1e-4)


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    save(make_whole("mistral small", ties=False), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"language_model.model.twist": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"language_model\.model\.twist .* has no place"):
        check_tensors(tmp_path)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="has a tower for images, which what is written"):
        Opened(tmp_path, "cpu", "float32")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    for changes, said in (
        ({"text_config": text | {"model_type": "llama"}}, r"text_config\.model_type = 'llama' is"),
        ({"text_config": text | {"head_dim": 0}}, r"text_config\.head_dim = 0 is not a whole"),
        ({"text_config": [1]}, r"text_config = \[1\] is not an object"),
        ({"model_type": "mistral"}, "model_type = 'mistral' is not that of this architecture"),
    ):
        edit_config(tmp_path, **({"model_type": "mistral3", "text_config": text} | changes))
        with pytest.raises(CheckpointError, match=said):
            read_config(tmp_path)


def test_matrices_in_fp8_as_they_are_published(tmp_path: Path) -> None:
    """Each matrix of the text model has one scale; towers are not quantised."""
    save(make_whole("ministral 3", ties=True), tmp_path)
    path, found = tmp_path / "model.safetensors", {}
    for name, x in load_file(path).items():
        is_text = name.startswith("language_model.model.layers") and name.endswith("proj.weight")
        if is_text:
            scale = x.abs().max() / 448
            found[f"{name}_scale_inv"] = scale
            found[name.replace("weight", "activation_scale")] = scale.clone()
        found[name] = (x / scale).to(torch.float8_e4m3fn) if is_text else x
    save_file(found, path)
    left = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    edit_config(tmp_path, quantization_config=fp8 | {"modules_to_not_convert": left})
    check_tensors(tmp_path)
    (prompt,) = random_prompts([9], 211)
    generation = Generation(prompt, 1)
    Driver(make_runner(tmp_path), keep_logits=True).finish([generation])
    with torch.no_grad():
        truth = make_whole("ministral 3", ties=True)(torch.tensor([prompt])).logits[0, -1]
    likeness = torch.cosine_similarity(generation.logits[0], truth, dim=0)
    assert likeness > 0.99


@pytest.mark.parametrize("name", ["qwen 2 vl", "qwen 2.5 vl"])
def test_keys_beside_those_of_the_whole(name: str, tmp_path: Path) -> None:
    """As in published files, which call the rotation `mrope`."""
    save(make_whole(name, ties=False), tmp_path)
    expected = read_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = {key: x for key, x in config.pop("text_config").items() if key not in config}
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rms_norm_eps": 1e-6}
    old = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(config | text | {"rope_scaling": old}))
    found = read_config(tmp_path)
    assert (found.ropes, found.axes, found.dims.eps) == (expected.ropes, expected.axes, 1e-6)
    assert {"vision_config", "image_token_id"} <= set(found.ignored)
    check_tensors(tmp_path)


@pytest.mark.parametrize("name", ["qwen 2 vl", "qwen 2.5 vl", "qwen 3 vl", "gemma 3", "llava"])
def test_a_silent_config_has_the_values_of_the_whole(name: str, tmp_path: Path) -> None:
    """They may differ from those of the text model's architecture alone."""
    begin = CASES[name][0]
    config = getattr(transformers, f"{begin}Config")()
    text = config.get_text_config()
    keys = {"architectures": [f"{begin}ForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    found = read_config(tmp_path)
    rope = text.rope_parameters.get("full_attention", text.rope_parameters)
    sizes = (text.hidden_size, text.num_hidden_layers, text.num_key_value_heads, text.vocab_size)
    d = found.dims
    assert (d.hidden_size, d.num_layers, d.num_kv_heads, d.vocab_size) == sizes
    theta = max(each.theta for each in found.ropes)
    assert (d.eps, theta) == (text.rms_norm_eps, rope["rope_theta"])
    assert found.max_positions == text.max_position_embeddings


@pytest.mark.parametrize(("name", "size", "num_stages"), [("gemma 3", 2, 1), ("qwen 3 vl", 1, 2)])
def test_ranks_and_stages_read_their_part(
    name: str, size: int, num_stages: int, tmp_path: Path
) -> None:
    compare(save(make_whole(name, ties=False), tmp_path), size, 211, num_stages)


WITHOUT_HEAD = "of the class without a head"
QUICK = ("gemma 3", "qwen 2 vl")
# Names of decoder and head, and what those of towers begin with.
SPELLINGS: dict[str, tuple[str, str, str]] = {
    "before 4.52": ("language_model.model.", "language_model.lm_head.", ""),
    "in memory": ("model.language_model.", "lm_head.", "model."),
    WITHOUT_HEAD: ("language_model.", "", ""),
    "text model": ("model.text_model.", "lm_head.", "model."),
    "by itself": ("model.", "lm_head.", ""),
}


def spell(directory: Path, spelling: str, own: Mapping[str, str]) -> None:
    """Rename the tensors of files whose decoder and head are called as `own` has it."""
    decoder, head, tower = SPELLINGS[spelling]
    found, path = {}, directory / "model.safetensors"
    for name, x in load_file(path).items():
        if name.startswith(f"{own['lm_head']}."):
            assert head, "there is none"
            new = head + name.removeprefix(f"{own['lm_head']}.")
        elif name.startswith(f"{own['model']}.") and "visual" not in name:
            new = decoder + name.removeprefix(f"{own['model']}.")
        else:
            new = tower + name.removeprefix("model.")
        found[new] = x
    save_file(found, path, {"format": "pt"})


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", quick_of(CASES, QUICK))
def test_files_may_spell_names_as_any_class_does(name: str, spelling: str, tmp_path: Path) -> None:
    """Trainers write what transformers has in memory, and cut the text model out."""
    ties = spelling == WITHOUT_HEAD
    if ties and name == "llama 4":
        pytest.skip("its class without a head is the same")
    save(make_whole(name, ties), tmp_path)
    prompt = random_prompts([9], 211)[0]

    def logits() -> torch.Tensor:
        check_tensors(tmp_path)
        generation = Generation(prompt, 2)
        Driver(make_runner(tmp_path), keep_logits=True).finish([generation])
        return torch.stack(generation.logits)

    expected = logits()
    spell(tmp_path, spelling, read_config(tmp_path).tensors.own)
    assert torch.equal(logits(), expected)
    path = tmp_path / "model.safetensors"
    twist = f"{SPELLINGS[spelling][0]}twist"
    save_file(load_file(path) | {twist: torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(twist)} .* has no place"):
        check_tensors(tmp_path)


def test_a_head_that_no_file_has_is_said_to_be_missing(tmp_path: Path) -> None:
    save(make_whole("mistral small", ties=True), tmp_path)
    spell(tmp_path, WITHOUT_HEAD, read_config(tmp_path).tensors.own)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: there is no head.* tie_word_embeddings"):
        check_tensors(tmp_path)
