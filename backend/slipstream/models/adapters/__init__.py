"""Adapters on disk: which of them are served, and what they add to the decoder."""
