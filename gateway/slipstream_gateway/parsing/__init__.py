"""Split a model's output into text, reasoning and tool calls, by its own format."""
