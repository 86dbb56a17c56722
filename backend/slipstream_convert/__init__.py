"""Pickled checkpoint -> safetensors, offline; and the writer of checkpoint directories."""
