"""Which sizes a scheme of weights is checked by: those of matrices' inputs, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.hf import read_model
from slipstream.models.model_config import ModelConfig
from slipstream.models.reader import Reader
from slipstream.models.registry import family_of
from slipstream.runner.scheme_check import check_scheme

FP8 = EngineConfig(checkpoint="", load_format="random", quantization="fp8")


def model_of(architecture: str, **keys: object) -> ModelConfig:
    said = {"architectures": [architecture], **family_of(architecture).said, **keys}
    return read_model(Reader(said, architecture), architecture, Path("/nonexistent"))


def check(model: ModelConfig) -> None:
    check_scheme(FP8, model, torch.device("cuda", 0), torch.bfloat16)


def test_latent_attention_is_checked_by_the_inputs_that_it_has() -> None:
    """128 heads of a latent are 36,864 numbers, more than kernels take; none is a matrix's."""
    model = model_of("DeepseekV3ForCausalLM")
    assert model.dims.num_heads * model.dims.head_size == 36_864
    check(model)
    latent = model.axes.latent
    assert latent is not None
    for change, words in (
        ({"value": 264}, r"num_attention_heads \* v_head_dim = 33792"),
        ({"query_rank": 1544}, "q_lora_rank = 1544"),
    ):
        axes = replace(model.axes, latent=replace(latent, **change))
        with pytest.raises(ConfigError, match=words):
            check(replace(model, axes=axes))
    check(replace(model, axes=replace(model.axes, latent=replace(latent, query_rank=0))))


def test_other_attention_is_checked_by_its_heads() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads \* head_dim = 36864"):
        check(model_of("LlamaForCausalLM", num_attention_heads=128, head_dim=288))
