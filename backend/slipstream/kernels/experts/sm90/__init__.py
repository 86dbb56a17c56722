"""Kernels of experts with the instructions of Hopper (sm_90a)."""
