"""A family is one file: a made-up one is served, and sizes come from the model."""

import json
import re
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
    save,
)
from fixtures.tiers import quick_of
from safetensors.torch import load_file, save_file
from slipstream.errors import CheckpointError
from slipstream.models import family as families
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.check import check_tensors
from slipstream.models.config_class import ConfigClass, read_config_class
from slipstream.models.decoder import block_elements
from slipstream.models.families_page import written
from slipstream.models.family import family
from slipstream.models.hf import read_config
from slipstream.models.reader import Reader
from slipstream.models.registry import supported
from slipstream.runner import served_page

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn": "attn",
    "self_attn.o_proj": "attn.dense",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "input_layernorm",  # as another tensor is called elsewhere
}
STORED = {
    "model.layers.1.self_attn.o_proj.weight": "transformer.h.1.attn.dense.weight",
    "model.layers.0.self_attn.q_proj.weight": "transformer.h.0.attn.q_proj.weight",
    "model.layers.0.post_attention_layernorm.weight": "transformer.h.0.input_layernorm.weight",
    "model.layers.0.input_layernorm.weight": "transformer.h.0.ln_1.weight",
    "model.layers.10.mlp.down_proj.weight": "transformer.h.10.mlp.down_proj.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.normal.weight": "model.normal.weight",
    "lm_head.weight": "lm_head.weight",
}


@pytest.mark.parametrize(("name", "stored"), STORED.items())
def test_names_are_replaced_by_whole_parts_and_once(name: str, stored: str) -> None:
    assert TensorNames(NAMES).stored(name) == stored
    assert TensorNames().stored(name) == name


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen 2 with other names, and a key for its biases; transformers does not have it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families.registered()))
    own = read_config_class("Qwen2ForCausalLM").defaults
    config_class = ConfigClass(("made_up",), {**own, "qkv_bias": True, "twist": 0.0})

    @family(
        "MadeUpForCausalLM",
        keys="qkv_bias use_sliding_window max_window_layers",
        tensors=TensorNames(NAMES, unread=(".attn.bias",)),
        config_class=config_class,
    )
    def made_up(config: Reader) -> Axes:
        return Axes(qkv_bias=config.flag("qkv_bias", default=True))


def renamed(directory: Path) -> Path:
    """A checkpoint of the made-up family."""
    save(make_model("qwen2", hidden_size=64), directory)
    path = directory / "model.safetensors"
    tensors = {TensorNames(NAMES).stored(k): v for k, v in load_file(path).items()}
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a mask, as GPT-2's files have
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(directory, architectures=["MadeUpForCausalLM"], model_type="made_up")
    return directory


@pytest.mark.usefixtures("made_up")
def test_a_made_up_family_of_one_file(tmp_path: Path) -> None:
    """All keys, axes, names and leftovers of its file are honoured; logits equal its twin's."""
    directory = renamed(tmp_path / "new")
    check_tensors(directory)
    generation = Generation(random_prompts([20])[0], 1)
    driver = Driver(make_runner(directory), keep_logits=True)
    driver.finish([generation])
    with torch.no_grad():
        expected = make_model("qwen2", hidden_size=64)(torch.tensor([generation.prompt])).logits
    assert (generation.logits[0] - expected[0, -1]).abs().max() <= 1e-4
    edit_config(directory, twist=0.5)
    with pytest.raises(CheckpointError, match=r"twist = 0\.5 is not implemented"):
        read_config(directory)
    edit_config(directory, twist=0.0, qkv_bias=False)
    with pytest.raises(CheckpointError, match=r"attn\.k_proj\.bias .* has no place"):
        check_tensors(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("transformer.h.1.attn.dense.weight")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"transformer\.h\.1\.attn\.dense\.weight is missing"):
        check_tensors(directory)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_tied", quick_of([False, True], [True]))
def test_sizes_are_those_of_the_model(name: str, is_tied: bool, tmp_path: Path) -> None:
    model = make_model(name, tie_word_embeddings=is_tied, num_hidden_layers=3)
    directory = tmp_path
    model.config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    counted = block_elements(read_config(directory))
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    matrices = {name: size for name, size in matrices.items() if "correction" not in name}
    inside = sum(size for name, size in matrices.items() if re.search(r"\.\d+\.", name))
    assert counted == inside


@pytest.mark.parametrize("file", sorted(Path(families.__file__).parent.glob("families/*.py")))
def test_a_family_is_one_short_file(file: Path) -> None:
    """At most 60 lines from the first function on, without imports, empty ones and keys of GGUF
    files: names, which stand above, are not counted.
    """
    body = file.read_text(encoding="utf-8").partition("\n\n\n")[2] or file.read_text()
    body = re.sub(r"def gguf_config.*?\n\n\n", "", body, flags=re.DOTALL)
    lines = [line for line in body.splitlines() if line and "import" not in line]
    assert len(lines) <= 60


def test_the_page_of_families_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    assert page == written(page), "run `make families`"
    assert all(f"| `{name}` |" in page for name in supported())


@pytest.mark.rest
def test_the_table_of_what_each_is_served_with_is_current() -> None:
    """Every architecture is in one line of it; answers are those of the start."""
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.partition("<!-- served -->\n")[2].partition("<!-- /served -->")[0]
    assert table == served_page.table(), "run `make families`"
    names = [name for line in table.splitlines() for name in line.split(" | ")[-1].split()]
    assert sorted(name.strip("`") for name in names if name.startswith("`")) == sorted(supported())


@pytest.mark.parametrize(
    ("architecture", "column", "answer"),
    [
        ("LlamaForCausalLM", 0, "float32, float16, bfloat16"),
        ("MixtralForCausalLM", 0, "float16, bfloat16"),
        ("DeepseekV3ForCausalLM", 1, "fp8, int4, int8, w4a8, w8a8"),
        ("DeepseekV3ForCausalLM", 2, "auto"),
        ("GemmaForCausalLM", 3, "no: on a GPU has no kernels for heads of 256"),
        ("MixtralForCausalLM", 4, "linear layers, routed experts, head, embedding"),
        ("Qwen3ForCausalLM", 5, "no: keys are normalised as they are rotated"),
    ],
)
def test_answers_of_one_architecture(architecture: str, column: int, answer: str) -> None:
    assert served_page.answers(architecture)[column] == answer
