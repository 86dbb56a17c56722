"""Hold what speculation knows of one sequence; `slipstream.drafting` changes it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class DraftState:
    """The drafts of a sequence, counted since it was submitted."""

    num_drafted: int = 0  # tokens that were verified
    num_accepted: int = 0  # of these, those that became tokens of the output
