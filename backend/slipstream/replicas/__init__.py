"""Several engines that serve one model, behind a router that looks like an engine."""
