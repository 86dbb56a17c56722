"""Checkpoint to model repository, and the server around it."""
