"""What attention in each layer sees of a step: its rows, in the layer's table and window."""

import torch
from torch import Tensor

from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.chunked import ChunkView
from slipstream.layers.streaming import Streaming
from slipstream.layers.two_way import TwoWays
from slipstream.runner.plan import Plan
from slipstream.runner.step_inputs import StepInputs
from slipstream.runner.step_shape import StepShape


class LayerInputs:
    """Owns the tables of blocks on the device, which each step fills anew.

    Args:
        plan: of the engine.
        most_rows: rows of the largest step.
    """

    def __init__(self, plan: Plan, most_rows: int) -> None:
        places, windows = plan.groups.places, plan.model.windows
        # Of each layer its table and window.
        self._layers = [(each[0], w) for each, w in zip(places, windows, strict=True)]
        self._kinds = sorted(set(self._layers))
        self._attention = plan.attention
        self._chunk = plan.window.size if plan.window.is_chunked else 0
        self.num_tables = plan.window.num_tables  # of a row
        size = self.num_tables * most_rows, plan.table_blocks
        self._tables = torch.zeros(size, dtype=torch.int32, device=plan.device)
        self._maker: Streaming | TwoWays | None = None  # of inputs of all layers
        if plan.model.axes.two_way is not None:
            self._maker = TwoWays(plan.model.rope, plan.attention, plan.device)
        if plan.window.has_gaps:
            self._maker = Streaming(plan.model.rope, plan.attention, plan.device)

    def __len__(self) -> int:
        """Count the layers."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return self._tables.nbytes

    def tables(self, shape: StepShape) -> Tensor:
        """Return the tables of a step, `[rows * num_tables, blocks] i32`."""
        return self._tables[: shape.num_rows * self.num_tables]

    def of(self, shape: StepShape, inputs: StepInputs, cache: Tensor) -> list[AttentionInputs]:
        """Return the inputs of each layer; `cache` is that of any.

        A plan without a window says what is shared in its table; others are of lengths alone, and
        serve all tables of the window. Layers that see chunks have full attention over a view.
        """
        if self._maker is not None:
            return [self._maker.inputs(cache, self.rows(shape, inputs, 0))] * len(self)
        made: dict[tuple[int, int], AttentionInputs] = {}
        of_window: dict[int, AttentionInputs] = {}
        view: ChunkView | None = None  # of all tables
        for table, window in self._kinds:
            rows = self.rows(shape, inputs, table)
            if window and self._chunk:
                view = view or ChunkView.of(rows, self._chunk, self._attention.spec.block_size)
                made[table, window] = AttentionInputs.of(self._attention, cache, view(rows), 0)
                continue
            if window in of_window:
                made[table, window] = of_window[window].with_table(rows.slots, rows.block_tables)
                continue
            made[table, window] = AttentionInputs.of(self._attention, cache, rows, window)
            if window:
                of_window[window] = made[table, window]
        return [made[kind] for kind in self._layers]

    def rows(self, shape: StepShape, inputs: StepInputs, table: int) -> StepRows:
        """Return the rows of a step, with one of their tables."""
        tables = self.tables(shape)
        return StepRows(
            inputs.positions,
            inputs.slots.view(self.num_tables, shape.num_tokens)[table],
            tables.view(shape.num_rows, self.num_tables, tables.shape[1])[:, table],
            inputs.query_starts,
            inputs.lengths,
            shape.num_decodes,
            shape.max_queries,
            shape.has_drafts,
            shape.contexts,
        )
