"""GEMMs for Hopper: gemv (1 or 2 rows), skinny (up to 128), tall (tiles of 192 or 256)."""
