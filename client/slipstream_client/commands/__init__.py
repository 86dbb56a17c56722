"""The client's sub-commands of `slipstream`: each module has `add_parser` and `run`."""
