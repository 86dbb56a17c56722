"""GEMMs for Hopper: gemv (1, 2 rows), skinny (to 128, gated to 192), tall (tiles of 192 or 256)."""
