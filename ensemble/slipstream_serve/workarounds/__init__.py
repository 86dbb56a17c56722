"""Workarounds for faults of a tritonserver version, which a later version will not need."""
