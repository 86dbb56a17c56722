"""SDK and the `slipstream` command; speaks only the contract."""
