"""Pairs of files: X.py holds the reference in torch, X.cu the CUDA source of the same function."""
