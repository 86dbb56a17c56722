"""Hold what speculation knows of one sequence; `slipstream.drafting` changes it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class DraftState:
    """The drafts of a sequence, counted since it was submitted; `given` are its client's."""

    num_drafted: int = 0  # tokens that were verified
    num_accepted: int = 0  # of these, those that became tokens of the output
    given: tuple[int, ...] = ()  # guesses of the first outputs
    drafter: str = ""  # of those that a step verifies now
    is_given: bool = False  # those that a step verifies now are the client's

    def totals(self, outputs: list[int]) -> tuple[int, int]:
        """Return how many drafts there were, and how many became tokens of these outputs.

        All that the client gave are drafts, and each is right that no wrong one precedes, whatever
        the steps in which they were verified.
        """
        pairs = zip(self.given, outputs, strict=False)
        num_right = next(
            (i for i, (draft, token_id) in enumerate(pairs) if draft != token_id), None
        )
        if num_right is None:
            num_right = min(len(self.given), len(outputs))
        return self.num_drafted + len(self.given), self.num_accepted + num_right
