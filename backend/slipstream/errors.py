"""What stops the engine from starting: one line for the operator, never told to a client."""


class StartError(Exception):
    """The engine cannot start; the text says what is wrong, where, and what would be right."""


class CheckpointError(StartError):
    """A checkpoint that cannot be served: names the file, the key or tensor, and the value."""


class ConfigError(StartError):
    """An impossible `EngineConfig`: names the field, its value and the limit."""
