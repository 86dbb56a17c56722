"""Matrix products: linear layers, cuBLASLt and its tuning; own kernels by architecture below."""
