"""What attention in each layer sees of a step: its rows, in the layer's table and window."""

import torch
from torch import Tensor

from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.chunked import ChunkView
from slipstream.layers.skipping import Skipping
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
        places, windows, skips = plan.groups.places, plan.model.windows, plan.model.axes.skips
        self._skipping: Skipping | None = None
        skipping = frozenset[int]()
        if skips is not None and plan.attention.spec.skipped_tokens:
            where = plan.attention, plan.table_blocks, plan.device
            self._skipping, skipping = Skipping(skips, *where), skips.layers
        # Of each layer its table, its window and whether its heads skip blocks.
        self._layers = [
            (table, window, layer in skipping)
            for layer, ((table, _), window) in enumerate(zip(places, windows, strict=True))
        ]
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
        made: dict[tuple[int, int, bool], AttentionInputs] = {}
        of_window: dict[int, AttentionInputs] = {}
        view: ChunkView | None = None  # of all tables
        for kind in self._kinds:
            table, window, skips = kind
            rows = self.rows(shape, inputs, table)
            if window and self._chunk:
                view = view or ChunkView.of(rows, self._chunk, self._attention.spec.block_size)
                made[kind] = AttentionInputs.of(self._attention, cache, view(rows), 0)
                continue
            if window in of_window:
                made[kind] = of_window[window].with_table(rows.slots, rows.block_tables)
            elif skips:
                made[kind] = self._skipped(cache, rows, made.get((table, 0, False)))
            else:
                made[kind] = AttentionInputs.of(self._attention, cache, rows, window)
            if window:
                of_window[window] = made[kind]
        return [made[kind] for kind in self._layers]

    def _skipped(
        self, cache: Tensor, rows: StepRows, whole: AttentionInputs | None
    ) -> AttentionInputs:
        """Return the inputs of layers whose heads skip blocks; `whole` are those of others."""
        assert self._skipping is not None, "some layers skip"
        if not self._skipping.sees_all(cache, rows):
            return self._skipping.inputs(cache, rows, len(rows.positions))
        return whole or AttentionInputs.of(self._attention, cache, rows, 0)

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
