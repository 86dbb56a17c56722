"""Workarounds for tritonserver 2.51 (24.10)."""
