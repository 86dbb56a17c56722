"""Samples tokens from logits, and counts them for penalties."""
