"""Declares, compiles, caches and launches kernels; CUDA headers that all of them share."""
