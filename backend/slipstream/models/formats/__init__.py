"""Formats of quantised checkpoints: one file each reads tensors into `quant.matrix.QuantMatrix`."""
