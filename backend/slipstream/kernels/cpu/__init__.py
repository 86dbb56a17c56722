"""Kernels of the processor, in C++: built once a machine, chosen by what the processor has."""
