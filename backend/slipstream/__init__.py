"""Token ids in, token ids out: the engine, and the bridge from Triton to it."""

__version__ = "0.1.0"  # the distribution takes it from here; bridge and engine compare it
