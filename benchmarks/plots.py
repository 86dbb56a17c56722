"""Line plots as SVG text, without a library."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 90, 48, 54
INK, GRID = "#333333", "#e4e4e4"


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, with ticks; `is_log`: equal ratios are equally far apart."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    show: Callable[[float], str]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Line:
    """Points as they are connected; each may have a label."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = field(default_factory=list)


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _grid(
    x_axis: Axis, y_axis: Axis, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks:
        at = y(tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, at + 4, y_axis.show(tick), "end"))
    for tick in x_axis.ticks:
        at = x(tick)
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
        parts.append(_text(at, bottom + 18, x_axis.show(tick)))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 12, x_axis.title))
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:.1f})"'
    parts.append(_text(16, middle, y_axis.title, more=turned))
    return parts


def _line(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    places = [(x(a), y(b)) for a, b in line.points]
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    parts = [f'<path d="M{path}" fill="none" stroke="{line.color}" stroke-width="2.5"/>']
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{line.color}"/>' for a, b in places]
    style = f'fill="{line.color}" font-size="11"'
    for (a, b), label in zip(places, line.labels, strict=False):
        parts.append(_text(a + 6, b - 6, label, "start", style))
    style = f'fill="{line.color}" font-weight="bold"'
    if line.labels:  # those are to the right of their points
        a, b = max(places, key=lambda place: place[1])
        parts.append(_text(a - 10, b + 5, line.name, "end", style))
    else:
        a, b = max(places)
        parts.append(_text(a + 8, b + 5, line.name, "start", style))
    return parts


def plot(title: str, x_axis: Axis, y_axis: Axis, lines: Sequence[Line]) -> str:
    """The whole picture; lines without points are left out."""

    def x(value: float) -> float:
        return LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 26, title, "start", 'font-size="15" font-weight="bold"'),
        *_grid(x_axis, y_axis, x, y),
    ]
    for line in lines:
        if line.points:
            parts += _line(line, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"
