"""Attention for Hopper: prefill by wgmma."""
