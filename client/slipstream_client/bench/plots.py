"""Line plots as SVG text, without a library.

Ink, grid and paper have the colours `INK`, `GRID` and `PAPER`. The style sheet of a page may
override them for the classes `ink`, `grid` and `paper`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 90, 48, 54
INK, GRID, PAPER = "#333333", "#e4e4e4", "#ffffff"
_STEPS = (1, 2, 5, 10)
_MAX_TICKS = 10


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, with ticks; `is_log`: a logarithmic scale."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    show: Callable[[float], str]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Map a value to its position: 0 at `low`, 1 at `high`."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def fit_axis(title: str, values: Sequence[float], is_log: bool = False) -> Axis:
    """Fit an axis with round ticks around the values: linear from 0, or logarithmic."""
    top = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
    if is_log:
        least = min((value for value in values if value > 0), default=top)
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(top)) + 2)
        steps = [k * 10.0**power for power in powers for k in _STEPS[:-1]]
        low = max(step for step in steps if step <= least * (1 + 1e-9))
        high = min(step for step in steps if step >= top * (1 - 1e-9) and step > low)
        ticks = [step for step in steps if low <= step <= high]
        if len(ticks) > _MAX_TICKS:
            ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
        return Axis(title, low, high, ticks, _short, is_log=True)
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(k * unit for k in _STEPS if k * unit * 5 >= top)
    count = math.ceil(top / step - 1e-9)
    return Axis(title, 0, step * count, [step * i for i in range(count + 1)], _short)


def axis_of(title: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis with a tick at each value; needs two different values."""
    ticks = sorted(set(values))
    return Axis(title, ticks[0], ticks[-1], ticks, _short, is_log=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Line:
    """Points and how they are sampled: joined, dotted, each with an optional label."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = field(default_factory=list)
    is_joined: bool = True
    has_dots: bool = True


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _grid(
    x_axis: Axis, y_axis: Axis, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks:
        at = y(tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{right}" class="grid" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, at + 4, y_axis.show(tick), "end"))
    for tick in x_axis.ticks:
        at = x(tick)
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" class="grid" stroke="{GRID}"/>')
        parts.append(_text(at, bottom + 18, x_axis.show(tick)))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 12, x_axis.title))
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:.1f})"'
    parts.append(_text(16, middle, y_axis.title, more=turned))
    return parts


def _line(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    places = [(x(a), y(b)) for a, b in line.points]
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    parts = []
    if line.is_joined:
        parts.append(f'<path d="M{path}" fill="none" stroke="{line.color}" stroke-width="2.5"/>')
    dots = places if line.has_dots else []
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{line.color}"/>' for a, b in dots]
    style = f'fill="{line.color}" font-size="11"'
    for (a, b), label in zip(places, line.labels, strict=False):
        parts.append(_text(a + 6, b - 6, label, "start", style))
    return parts


def _name(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Write a line's name at its end, or where its labels leave room."""
    places = [(x(a), y(b)) for a, b in line.points]
    style = f'fill="{line.color}" font-weight="bold"'
    if line.labels:  # labels stand to the right of their points
        a, b = max(places, key=lambda place: place[1])
        return _text(a - 10, b + 5, line.name, "end", style)
    a, b = max(places)
    return _text(a + 8, b + 5, line.name, "start", style)


def _legend(lines: Sequence[Line]) -> list[str]:
    """List all names in a column beside the plot, for lines that end close together."""
    left = WIDTH - RIGHT + 10
    style = 'fill="{}" font-weight="bold"'
    return [
        _text(left, TOP + 12 + 18 * i, line.name, "start", style.format(line.color))
        for i, line in enumerate(lines)
    ]


def plot(
    title: str, x_axis: Axis, y_axis: Axis, lines: Sequence[Line], has_legend: bool = False
) -> str:
    """Return the plot as an SVG element; lines without points are left out."""
    lines = [line for line in lines if line.points]

    def x(value: float) -> float:
        return LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="13" '
        f'class="ink" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="paper" fill="{PAPER}"/>',
        _text(LEFT, 26, title, "start", 'font-size="15" font-weight="bold"'),
        *_grid(x_axis, y_axis, x, y),
    ]
    for line in lines:
        parts += _line(line, x, y)
    parts += _legend(lines) if has_legend else [_name(line, x, y) for line in lines]
    return "\n".join([*parts, "</svg>"]) + "\n"
