"""Which sequences a step may decode while others of a pipeline's stages run steps before it.

A token goes through all stages before the next one of its sequence can begin. So that every stage
has work, decodes are divided into as many steps as there are stages, each with its own sequences.
A sequence with a token in flight waits for it; prompts need no token, and their chunks follow each
other through the stages.
"""

from collections.abc import Iterable

from slipstream.core.sequence import Sequence


class StepShares:
    """The shares of `num_steps` steps in flight."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def runnable(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that the next step may compute: of decodes its share alone.

        The share is that of all that decode, in flight or not: with no step in flight it is never
        empty, and with all but one in flight it is what is left.
        """
        found: list[Sequence] = []
        decodes: list[Sequence] = []
        num_decodes = 0
        for sequence in running:
            if sequence.num_tokens - sequence.num_scheduled > 1:
                found.append(sequence)
                continue
            num_decodes += 1
            if not sequence.num_pending:
                decodes.append(sequence)
        share = -(-num_decodes // self._num_steps)
        return [*found, *decodes[:share]]


def split(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return those that decode in the next step, and those with more than a token to compute."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for sequence in running:
        num_tokens = sequence.num_tokens
        if num_tokens - sequence.num_scheduled > 1:
            prefills.append(sequence)
        elif (
            num_tokens < sequence.num_final  # else its last token is in flight
            and num_tokens <= sequence.cache.capacity  # else it waits for a fence
            and not (
                sequence.num_pending and (sequence.needs_every_token or sequence.is_speculating)
            )
        ):
            decodes.append(sequence)
    return decodes, prefills
