"""Copies the inputs of a step to the device."""
