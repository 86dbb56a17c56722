"""Draws tokens from logits, and counts them for penalties."""
