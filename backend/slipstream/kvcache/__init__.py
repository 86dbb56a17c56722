"""The paged KV cache as bookkeeping: blocks, reuse, retention, host tier. No array library."""
