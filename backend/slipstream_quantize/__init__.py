"""Make a checkpoint in fewer bits: `slipstream quantize`. Runs offline; no server imports it."""
