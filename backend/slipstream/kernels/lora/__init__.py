"""Low-rank terms that adapters add to GEMMs of rows."""
