"""Fusion as a rewrite: plain layers in, the same layers with fused GEMMs out."""
