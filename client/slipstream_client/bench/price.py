"""What the server says that it costs."""

import math
import re
import urllib.error
import urllib.request

_GAUGE = re.compile(r"^slipstream_gpu_hour_price(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PATIENCE_S = 3.0
_MAX_BYTES = 1 << 24


def price_per_hour(metrics_url: str) -> float | None:
    """The price of an hour among a server's metrics; None where it has none, or is not there."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=_PATIENCE_S) as reply:
            text = reply.read(_MAX_BYTES).decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError):
        return None
    return price_in(text)


def price_in(metrics: str) -> float | None:
    """The highest price in a text of Prometheus: before an engine has told its own, one is 0."""
    found = []
    for word in _GAUGE.findall(metrics):
        try:
            found.append(float(word))
        except ValueError:
            continue
    return max((price for price in found if price > 0 and math.isfinite(price)), default=None)
