"""Count drafts for metrics: by drafter, and accepted ones by their position in a step."""

from slipstream.figures import DRAFT_POSITIONS, DRAFTERS


class DraftCounts:
    """What became of all drafts; `counters` are by the names of `figures.COUNTERS`."""

    def __init__(self) -> None:
        """Start with zeros."""
        names = ("drafts", "drafted_tokens", "accepted_tokens")
        self.counters = {f"{name}:{drafter}": 0.0 for name in names for drafter in DRAFTERS}
        self.counters |= {f"accepted_at:{position}": 0.0 for position in DRAFT_POSITIONS}

    def add(self, drafter: str, num_drafts: int, num_right: int) -> None:
        """Add the drafts of one sequence in one step."""
        counters = self.counters
        counters[f"drafts:{drafter}"] += 1
        counters[f"drafted_tokens:{drafter}"] += num_drafts
        counters[f"accepted_tokens:{drafter}"] += num_right
        for position in range(num_right):
            counters[f"accepted_at:{DRAFT_POSITIONS[min(position, len(DRAFT_POSITIONS) - 1)]}"] += 1

    def total(self, name: str) -> float:
        """Return the sum of a counter over all drafters."""
        return sum(self.counters[f"{name}:{drafter}"] for drafter in DRAFTERS)
