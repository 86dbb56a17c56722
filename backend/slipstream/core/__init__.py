"""Sequences, batches, stop conditions, prefix digests: plain data, no arrays, no I/O."""
