"""Errors that prevent the engine's start: one line for the operator, never sent to a client."""


class StartError(Exception):
    """A reason why the engine cannot start: what is wrong, where, and what would be right."""


class CheckpointError(StartError):
    """A checkpoint that cannot be served: names the file, the key or tensor, and the value."""


class ConfigError(StartError):
    """An impossible `EngineConfig`: names the field, its value and the limit."""
