"""Which modules a configuration means: what PEFT 0.21.2 answered, and what is beside it refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation
from safetensors.torch import load_file, save_file
from slipstream.errors import CheckpointError
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.adapters.selection import read_selection
from slipstream.models.reader import Reader
from slipstream.runner.model_runner import ModelRunner

PEFT = Path(__file__).parents[1] / "fixtures/models/peft"
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.12.mlp.down_proj"
EXPERT = "model.layers.0.experts.1.w1"
# Of each: the configuration, and which of Q, DOWN, EXPERT and `lm_head` PEFT gives terms; all where
# it does not say, or by a regex that is not looked at.
RULES: list[tuple[dict[str, object], str]] = [
    ({}, "1111"),
    ({"target_modules": "all-linear"}, "1111"),
    ({"target_modules": []}, "0000"),
    ({"target_modules": ["q_proj", "w1"]}, "1010"),
    ({"target_modules": ["proj", "_proj", "self_attn"]}, "0000"),
    ({"target_modules": [Q, "mlp.down_proj"]}, "1100"),
    ({"target_modules": r".*\.layers\.1\..*"}, "1000"),
    ({"target_modules": "q_proj"}, "0000"),
    ({"target_modules": "(?:.*?(?:vision|text).*?(?:attn|mlp).*?(?:q_proj|w1).*?)"}, "1111"),
    ({"exclude_modules": ["q_proj"]}, "0111"),
    ({"target_modules": ["q_proj", "w1"], "exclude_modules": r".*experts.*"}, "1000"),
    ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1}, "1000"),
    ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 12]}, "0100"),
    ({"target_modules": ["w1", "lm_head"], "layers_to_transform": [0]}, "0011"),
    ({"target_modules": [Q, "down_proj"], "layers_to_transform": [7]}, "1000"),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        "1000",
    ),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, "0000"),
]


@pytest.mark.parametrize(("given", "wanted"), RULES, ids=str)
def test_modules_are_those_of_peft(given: dict[str, object], wanted: str) -> None:
    selection = read_selection(Reader(given, "x"))
    modules = (Q, DOWN, EXPERT, "lm_head")
    found = "".join(str(int(selection.left_out_by(module) is None)) for module in modules)
    assert found == wanted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"target_modules": ["q_proj"]}, "k_proj' has tensors, but target_modules of"),
        ({"exclude_modules": ["v_proj"]}, "v_proj' has tensors, but exclude_modules of"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"], "layers_to_transform": [0]},
            "layers.1.self_attn.k_proj' has tensors, but layers_to_transform of",
        ),
        ({"target_modules": {"q_proj": 1}}, "target_modules = .* neither a text nor a list"),
        ({"layers_to_transform": [True]}, "layers_to_transform = .* neither a number nor a list"),
        ({"layers_pattern": ["("]}, r"layers_pattern = .* has '\(', no regex"),
        ({"kasa_config": {}}, "kasa_config = {} is not implemented"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = .* changes the base's"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = .* changes the base's"),
    ],
    ids=str,
)
def test_what_peft_would_leave_out_or_change_is_refused(
    given: dict[str, object], why: str, base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    pairs = draw_pairs(base, ["q_proj", "k_proj", "v_proj"], 2)
    folder = write_adapter(tmp_path, pairs, 2, **given)
    with pytest.raises(CheckpointError, match=why):
        runner.adapters.read(str(folder))


def test_head_and_embedding_that_nothing_names_are_those_of_the_file(
    runner: ModelRunner, tmp_path: Path
) -> None:
    """PEFT writes both with a vocabulary that grew, or tied ones, and loads them into the model."""
    folder = tmp_path / "saved"
    shutil.copytree(PEFT / "saved", folder)
    given = json.loads((folder / CONFIG).read_text())
    recorded = load_file(PEFT / "logits.safetensors")
    ids = recorded["ids"].tolist()
    for names in (["model.embed_tokens"], None):
        (folder / CONFIG).write_text(json.dumps(given | {"modules_to_save": names}))
        number = runner.adapters.add(runner.adapters.read(str(folder)))
        row = Generation(ids, 1, adapter=number)
        Driver(runner, keep_logits=True).finish([row])
        assert (row.logits[0] - recorded["saved"][len(ids) - 1]).abs().max() < 1e-4
        runner.adapters.remove(number)
    tensors = load_file(folder / TENSORS)
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, folder / TENSORS)
    with pytest.raises(CheckpointError, match="nor are lm_head and embed_tokens both there"):
        runner.adapters.read(str(folder))


def test_names_of_a_state_that_peft_did_not_save_are_said(
    base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, draw_pairs(base, targets_of(base), 2), 2)
    found = {
        k.replace(".weight", ".default.weight"): x for k, x in load_file(folder / TENSORS).items()
    }
    save_file(found, folder / TENSORS)
    with pytest.raises(CheckpointError, match=r"lora_[AB].default.weight' is none of a LoRA's"):
        runner.adapters.read(str(folder))


def test_whole_matrices_that_are_the_models_own_replace_nothing(
    base: torch.nn.Module, runner: ModelRunner, tmp_path: Path
) -> None:
    """Else a step with them could not be a graph, and prompts would have no log probabilities."""
    plain = write_adapter(tmp_path / "plain", draw_pairs(base, ["q_proj"], 2), 2)
    tensors = load_file(plain / TENSORS)
    ends = {
        "lm_head": base.lm_head.weight.detach().clone(),
        "model.embed_tokens": base.model.embed_tokens.weight.detach().clone(),
    }

    def read(name: str) -> AdapterWeights:
        folder = tmp_path / name
        shutil.copytree(plain, folder)
        own = {f"base_model.model.{module}.weight": x for module, x in ends.items()}
        save_file((tensors if name != "alone" else {}) | own, folder / TENSORS)
        return runner.adapters.read(str(folder))

    same, wanted = read("same"), runner.adapters.read(str(plain))
    assert same.terms.keys() == wanted.terms.keys()
    assert not same.changes_head
    assert same.digest != wanted.digest
    assert read("alone").changes_head
    ends["lm_head"][3, 5] += 1
    assert read("other").terms.keys() == {*wanted.terms, "lm_head"}
