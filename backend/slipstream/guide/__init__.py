"""Guided output: from what an output must be to the tokens that may come next."""
