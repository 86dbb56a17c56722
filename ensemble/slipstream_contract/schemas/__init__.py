"""The tensors of each contract, read into requests."""
