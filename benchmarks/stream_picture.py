"""The delays of streams as a picture: which share of the tokens was handed over within how long."""

from typing import Any

from slipstream_client.bench.plots import HEIGHT, WIDTH, Axis, Line, plot
from stream_figures import SHARES

_COLORS = ("#1f6fb4", "#d1661a", "#2c8a4b", "#7a4fb5", "#b0303a", "#6b6b6b")
_TICKS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_TICKS = (0, 50, 90, 99, 99.9)


def picture(result: dict[str, Any]) -> str:
    """SVG text: the wirings side by side."""
    rows = result["rows"]
    values = [value for row in rows for value in row["shares_ms"]]
    low = max((tick for tick in _TICKS_MS if tick <= min(values)), default=_TICKS_MS[0])
    high = min((tick for tick in _TICKS_MS if tick >= max(values)), default=_TICKS_MS[-1])
    ticks = [tick for tick in _TICKS_MS if low <= tick <= high]
    y_axis = Axis("ms from making to hand-over", low, high, ticks, lambda ms: f"{ms:g}", True)
    x_axis = Axis(
        "% of all tokens", 1, _rarity(_TICKS[-1]), [_rarity(share) for share in _TICKS], _show, True
    )
    names = list(dict.fromkeys(_name(row) for row in rows))
    parts = []
    for wiring in dict.fromkeys(row["wiring"] for row in rows):
        lines = [
            Line(_name(row), _COLORS[names.index(_name(row)) % len(_COLORS)], _points(row, y_axis))
            for row in rows
            if row["wiring"] == wiring
        ]
        title = f"{wiring}: streams x tok/s, {result['cores']} cores"
        parts.append(plot(title, x_axis, y_axis, lines))
    return _side_by_side(parts)


def _side_by_side(pictures: list[str]) -> str:
    width = WIDTH * len(pictures)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'width="{width}" height="{HEIGHT}">\n'
    )
    moved = [
        part.replace("<svg ", f'<svg x="{WIDTH * number}" ', 1)
        for number, part in enumerate(pictures)
    ]
    return head + "".join(moved) + "</svg>\n"


def _name(row: dict[str, Any]) -> str:
    return f"{row['streams']}x{row['rate']}"


def _points(row: dict[str, Any], axis: Axis) -> list[tuple[float, float]]:
    pairs = zip(SHARES, row["shares_ms"], strict=True)
    return [(_rarity(share), min(axis.high, max(axis.low, ms))) for share, ms in pairs]


def _rarity(share: float) -> float:
    """One of how many tokens is later: 10 at 90 %, 100 at 99 %."""
    return 100 / (100 - share)


def _show(rarity: float) -> str:
    return f"{100 - 100 / rarity:.3g}"
