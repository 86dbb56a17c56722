"""Configurations of drafters for a shape, whose weights are then random."""

import json
from pathlib import Path
from typing import Any

from shapes import SHAPES

_MODEL_OF_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}


def _model(shape: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3.2's 1B beside a model that is larger, else the shape with one layer."""
    is_larger = shape["hidden_size"] > _MODEL_OF_1B["hidden_size"]
    return shape | _MODEL_OF_1B if is_larger else shape | {"num_hidden_layers": 1}


def _medusa(shape: dict[str, Any]) -> dict[str, Any]:
    return {"medusa_num_heads": 4, "medusa_num_layers": 1}


def _eagle3(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the published heads' form: one layer of the shape's width, a vocabulary of 32,000."""
    count = shape["num_hidden_layers"]
    return shape | {
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32_000, shape["vocab_size"]),
        "eagle_aux_hidden_state_layer_ids": [min(2, count - 1), count // 2, max(0, count - 3)],
    }


_CONFIGS = {"draft": _model, "medusa": _medusa, "eagle3": _eagle3}
NAMES = tuple(_CONFIGS)


def write_draft(drafter: str, shape: str, directory: Path) -> None:
    """Write the config.json of a drafter on the device."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[drafter](SHAPES[shape])
    (directory / "config.json").write_text(json.dumps(config))
