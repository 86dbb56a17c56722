"""Attention over the paged cache: decode, prefill, shared prefixes, sinks."""
