"""Checkpoints of drafters: what says tokens ahead of a model, for it to verify."""
