"""Decoders that are classes of transformers, with Slipstream's paged attention in their layers."""
