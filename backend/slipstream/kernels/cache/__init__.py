"""The layout of the paged KV cache, its quantised formats, and copies of blocks."""
