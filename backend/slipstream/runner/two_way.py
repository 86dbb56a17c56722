"""Models whose tokens of a prompt see each other: what they cannot have, and arrays of steps."""

import numpy as np

from slipstream.config import EngineConfig
from slipstream.core.batch import Batch
from slipstream.errors import ConfigError
from slipstream.layers.two_way import SECOND
from slipstream.models.model_config import ModelConfig
from slipstream.runner.step_arrays import StepArrays
from slipstream.runner.step_builder import StepBuilder
from slipstream.runner.step_shape import StepShape, gap_of

# Fields, and the one value that goes; attention refuses others by itself.
_LIMITS = {"speculation": "none", "tensor_parallel": 1, "pipeline_parallel": 1}


def check_two_way(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` for a setting that needs prompts to be seen one way."""
    if model.axes.two_way is None:
        return
    for field, value in _LIMITS.items():
        if (found := getattr(config, field)) != value:
            raise ConfigError(
                f"{field} = {found!r} does not go with {model.architecture}, whose tokens of a "
                f"prompt see each other; {value!r} does"
            )


def two_way_note(config: EngineConfig, model: ModelConfig) -> str:
    """Return the line of the start on how prompts are computed; empty: as ever."""
    if model.axes.two_way is None:
        return ""
    reuse = "; kv_cache_reuse is off: nothing of a prompt is found again"
    return (
        f"{model.architecture}: tokens of a prompt see each other, so each prompt is computed in "
        f"one step, its attention a token at a time{reuse * config.kv_cache_reuse}"
    )


class TwoWayBuilder(StepBuilder):
    """Makes the arrays of steps with rows of a token, whose lengths are what the token sees."""

    def build(
        self, batch: Batch, shape: StepShape, first_result: int, first_source: int
    ) -> StepArrays:
        """Return the batch in a shape; see `StepBuilder`. Positions are two in one."""
        arrays = super().build(batch, shape, first_result, first_source)
        begin, gap = gap_of(batch, shape)
        end = 0
        for number, row in enumerate(batch.rows):
            end += gap if number == begin else 0
            tokens = slice(end, end := end + len(row.token_ids))
            places = np.arange(row.start, row.start + len(row.token_ids))
            first, seen = row.sight
            assert row.start >= seen or places[-1] >= seen, "a prompt is in one row"
            second = places - seen + 1
            is_behind = second > 0
            arrays.positions[tokens] = np.where(is_behind, first + (second << SECOND), places)
            arrays.lengths[tokens] = np.maximum(places + 1, seen)
        return arrays

    def _is_next(self, last: object, batch: Batch, shape: StepShape) -> bool:
        """Return False: positions of a row do not lead to the next ones."""
        return False
