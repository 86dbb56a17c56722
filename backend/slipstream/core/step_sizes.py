"""Sizes of steps of decodes and prompts that leave no rows of a device idle.

A graph computes as many tokens as it was captured for, and GEMMs of many rows compute whole tiles.
A step that is a little larger than either takes as long as one that fills the next.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class StepSizes(NamedTuple):
    """Sizes of steps of one engine.

    Args:
        graphs: decodes that graphs have room for, ascending, and for each of these the tokens of
            prompts beside them, ascending.
        tile: rows that GEMMs compute at once; 1: any number.
    """

    graphs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    tile: int = 1

    def beside(self, num_decodes: int) -> tuple[int, ...]:
        """Return the tokens of prompts that graphs of so many decodes have room for, ascending."""
        for decodes, tokens in self.graphs:
            if num_decodes <= decodes:
                return tokens
        return ()

    def graph_of(self, num_decodes: int, num_tokens: int) -> tuple[int, int] | None:
        """Return the decodes and the tokens of prompts of the least graph for so many; None: there
        is none.
        """
        for decodes, beside in self.graphs:
            if num_decodes <= decodes:
                at = bisect_left(beside, num_tokens)
                return (decodes, beside[at]) if at < len(beside) else None
        return None

    def filled(self, num_decodes: int, num_tokens: int) -> int:
        """Return the most tokens of prompts that take no longer than `num_tokens` of them do."""
        if (graph := self.graph_of(num_decodes, num_tokens)) is not None:
            return graph[1]
        return -(-(num_decodes + num_tokens) // self.tile) * self.tile - num_decodes

    def whole(self, num_decodes: int, num_tokens: int) -> int:
        """Return the most of `num_tokens` tokens of prompts that leave no rows idle; 0: none do."""
        beside = self.beside(num_decodes)
        in_graph = beside[at - 1] if (at := bisect_right(beside, num_tokens)) else 0
        if at < len(beside):
            return in_graph
        in_tiles = (num_decodes + num_tokens) // self.tile * self.tile - num_decodes
        return max(in_graph, in_tiles)
