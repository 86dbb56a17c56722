"""Token ids to text: pure functions of one response."""
