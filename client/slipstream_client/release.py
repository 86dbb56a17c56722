"""Which release this is."""

import importlib.metadata


def release() -> str:
    """Return the version that is installed; of a checkout on the path alone there is none."""
    try:
        return importlib.metadata.version("slipstream")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
