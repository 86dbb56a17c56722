"""Token ids in, token ids out: the engine, and the bridge from Triton to it."""
