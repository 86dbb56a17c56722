"""Files as they are published: read by what they say, or refused by a key that is not read."""

import dataclasses
import json
from pathlib import Path

import pytest
from fixtures.models.published_named import ALL
from slipstream.errors import CheckpointError
from slipstream.models.hf import read_config
from slipstream.models.model_config import ModelConfig


def facts(config: ModelConfig) -> dict[str, object]:
    """All numbers and axes by their names, enums by theirs."""
    rope = config.rope
    named = dataclasses.asdict(config.dims) | {
        field.name: getattr(config.axes, field.name) for field in dataclasses.fields(config.axes)
    }
    return {name: getattr(value, "name", value) for name, value in named.items()} | {
        "max_positions": config.max_positions,
        "slopes": len(config.axes.slopes),
        "ties": config.ties_embeddings,
        "eos_ids": config.eos_ids,
        "windows": sum(map(bool, config.windows)),
        "still": sum(each.rotated == 0 for each in config.ropes),
        "theta": rope.theta,
        "kind": rope.kind,
        "rotated": config.dims.head_size if rope.rotated is None else rope.rotated,
    }


@pytest.mark.parametrize("name", ALL)
def test_a_published_file(name: str, tmp_path: Path) -> None:
    keys, wanted = ALL[name]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    if isinstance(wanted, str):
        with pytest.raises(CheckpointError) as error:
            read_config(tmp_path)
        assert wanted in str(error.value)
        return
    config = read_config(tmp_path)
    wanted = dict(wanted)
    assert set(wanted.pop("ignored", ())) <= set(config.ignored)
    found = facts(config)
    assert {key: found[key] for key in wanted} == wanted
