"""Run lm-eval's tasks on a checkpoint: `slipstream eval`. Runs offline; no server imports it."""
