"""Layers that model families are made of."""
