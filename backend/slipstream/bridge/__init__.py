"""The Triton side: execute, mailboxes, senders, credits, cancel, health. Neither torch nor CuPy."""
