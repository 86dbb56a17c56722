"""A file for each family: the keys that it reads, its axes, the names of its tensors."""
