"""Mixtures of experts: routing of rows, and GEMMs of the rows of each."""
