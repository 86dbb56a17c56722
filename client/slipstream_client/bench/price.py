"""Read the price of a GPU hour from a server's metrics."""

import math
import re
import urllib.error
import urllib.request

_GAUGE = re.compile(r"^slipstream_gpu_hour_price(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PATIENCE_S = 3.0
_MAX_BYTES = 1 << 24


def price_per_hour(metrics_url: str) -> float | None:
    """Return the price in a server's metrics; None if there is none or no server answers."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=_PATIENCE_S) as reply:
            text = reply.read(_MAX_BYTES).decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError):
        return None
    return price_in(text)


def price_in(metrics: str) -> float | None:
    """Return the highest price in Prometheus text: it is 0 until an engine has reported."""
    found = []
    for word in _GAUGE.findall(metrics):
        try:
            found.append(float(word))
        except ValueError:
            continue
    return max((price for price in found if price > 0 and math.isfinite(price)), default=None)
