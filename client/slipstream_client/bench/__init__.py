"""`slipstream bench`: load on a server, and what its clients saw of it."""
