"""Draft the next tokens of sequences on the host, and decide how many are worth a row."""
