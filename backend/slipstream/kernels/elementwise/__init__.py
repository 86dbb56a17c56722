"""Norms, activations, rotation and quantisation of rows."""
