"""Runs a `Batch` on the device: step inputs, staging, CUDA graphs, transfers, memory, plan."""
