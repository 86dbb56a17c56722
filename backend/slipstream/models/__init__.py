"""Hugging Face checkpoints: a reader that refuses, weights, one flat file per family."""
