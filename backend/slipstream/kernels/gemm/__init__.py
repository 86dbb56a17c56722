"""GEMMs: the op and its stages, cuBLASLt and its tuning; own kernels by architecture below."""
