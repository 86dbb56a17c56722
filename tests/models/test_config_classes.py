"""The committed keys of configuration classes are those of the transformers that is installed."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from slipstream.models.config_class import HARMLESS, is_of_transformers, read_config_class
from slipstream.models.registry import family_of, supported


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "config_classes.py"
    spec = importlib.util.spec_from_file_location("config_classes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_tool_writes(tool: ModuleType) -> None:
    """For what is served: all of it takes half a minute."""
    data = json.loads(tool.FILE.read_bytes())
    assert data["transformers"] == transformers.__version__
    assert data["shared"] == tool.shared()
    for name in filter(is_of_transformers, supported()):
        assert family_of(name).config_class == read_config_class(name)
        assert data[name] == tool.of_architecture(name)
    assert tool.text(data) == tool.FILE.read_text()


def test_keys_that_change_a_computation_are_there(tool: ModuleType) -> None:
    """Each source has keys there: fields, old names, aliases, defaults in code, models' modules."""
    gemma = read_config_class("Gemma3ForCausalLM")
    assert gemma.reads("final_logit_softcapping")
    assert not gemma.is_neutral("final_logit_softcapping", 30.0)
    assert gemma.is_neutral("final_logit_softcapping", None)
    assert gemma.is_neutral("sliding_window_pattern", 6)
    assert gemma.defaults["rope_local_base_freq"] == 10_000.0
    gpt2 = read_config_class("GPT2LMHeadModel")
    assert gpt2.reads("num_hidden_layers")
    assert gpt2.reads("scale_attn_by_inverse_layer_idx")
    llama = read_config_class("LlamaForCausalLM")
    assert llama.reads("per_layer_config")
    assert not llama.is_neutral("is_causal", False)
    assert not llama.reads("final_logit_softcapping")
    assert not any(llama.reads(key) for key in HARMLESS)
