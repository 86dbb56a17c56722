"""What the stages agree on: tensors, requests, limits, errors. Imports nothing of the stages."""
