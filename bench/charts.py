"""Time series as an SVG: a page of small charts, drawn without any library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT, GAP, PER_ROW = 400, 236, 10, 3
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 62
HEAD = 46
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#96d98d", "#ffb357", "#c4162a")
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Line:
    """One series: seconds since the start, and values."""

    legend: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel; `unit` as Grafana calls it."""

    title: str
    unit: str
    lines: Sequence[Line]


def page(title: str, note: str, charts: Sequence[Chart], seconds: float) -> str:
    """All charts over the same stretch of time."""
    rows = ceil(len(charts) / PER_ROW)
    width = PER_ROW * (WIDTH + GAP) + GAP
    height = HEAD + rows * (HEIGHT + GAP)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='#111217'/>",
        f"<text x='{GAP + 2}' y='29' fill='#e4e5ea' font-size='18'>{escape(title)}</text>",
        f"<text x='{width - GAP}' y='29' fill='#8e8f9a' font-size='12' text-anchor='end'>{escape(note)}</text>",
    ]
    for number, chart in enumerate(charts):
        x = GAP + number % PER_ROW * (WIDTH + GAP)
        y = HEAD + number // PER_ROW * (HEIGHT + GAP)
        parts += [f"<g transform='translate({x},{y})'>", *_chart(chart, seconds), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _chart(chart: Chart, seconds: float) -> Iterator[str]:
    yield f"<rect width='{WIDTH}' height='{HEIGHT}' rx='3' fill='#181b1f' stroke='#2a2d33'/>"
    yield f"<text x='12' y='22' fill='#d8d9df' font-size='13'>{escape(chart.title)}</text>"
    values = [value for line in chart.lines for _, value in line.points if isfinite(value)]
    step, top = _scale(max(values, default=0.0), chart.unit)
    for tick in range(round(top / step) + 1):
        y = _y(tick * step, top)
        yield f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#2a2d33'/>"
        label = _label(tick * step, chart.unit, top)
        yield f"<text x='{LEFT - 6}' y='{y + 4:.1f}' fill='#9fa0aa' font-size='11' text-anchor='end'>{label}</text>"
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        at = f"{round(share * seconds) // 60}:{round(share * seconds) % 60:02}"
        y = HEIGHT - BOTTOM + 15
        anchor = "end" if share == 1 else "middle"
        yield f"<text x='{x:.1f}' y='{y}' fill='#9fa0aa' font-size='10' text-anchor='{anchor}'>{at}</text>"
    for number, line in enumerate(chart.lines):
        yield from _line(line, COLOURS[number % len(COLOURS)], seconds, top)
    yield from _legend(chart.lines)


def _line(line: Line, colour: str, seconds: float, top: float) -> Iterator[str]:
    span = WIDTH - LEFT - RIGHT
    pieces: list[list[str]] = [[]]
    for at, value in line.points:
        if isfinite(value):
            pieces[-1].append(f"{LEFT + at / seconds * span:.1f},{_y(value, top):.1f}")
        elif pieces[-1]:
            pieces.append([])
    for piece in filter(None, pieces):
        yield f"<polyline points='{' '.join(piece)}' fill='none' stroke='{colour}' stroke-width='1.5'/>"


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    """In rows, as many names as fit; the rest is counted."""
    x, y = 14.0, HEIGHT - 28.0
    for number, line in enumerate(lines):
        width = 24 + sum(7.4 if letter.isupper() else 5.7 for letter in line.legend)
        if x + width > WIDTH - RIGHT and x > 14:
            x, y = 14.0, y + 15
        if y > HEIGHT - 8:
            yield f"<text x='{WIDTH - RIGHT}' y='22' fill='#8e8f9a' font-size='10' text-anchor='end'>and others</text>"
            return
        yield f"<rect x='{x:.0f}' y='{y - 6:.0f}' width='10' height='3' fill='{COLOURS[number % len(COLOURS)]}'/>"
        yield f"<text x='{x + 14:.0f}' y='{y:.0f}' fill='#b8b9c2' font-size='10.5'>{escape(line.legend)}</text>"
        x += width


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - min(value / top, 1.0) * (HEIGHT - TOP - BOTTOM)


def _scale(largest: float, unit: str) -> tuple[float, float]:
    """The distance of the grid's lines, and its upper end: three to five round steps."""
    least = {"percentunit": 0.01, "s": 0.001}.get(unit, 1.0)
    largest = max(largest, least)
    rough = largest / 4
    base = 10 ** floor(log10(rough))
    if unit == "bytes":
        base = 1024 ** floor(log10(rough) / log10(1024))
        step = next(base * factor for factor in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if base * factor >= rough)
    else:
        step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    return step, ceil(largest / step - 1e-9) * step


def _label(value: float, unit: str, top: float) -> str:
    match unit:
        case "s" if 0 < top < 1:
            return f"{value * 1000:g} ms"
        case "s":
            return f"{value:g} s"
        case "percentunit":
            return f"{value * 100:g} %"
        case "bytes":
            return f"{value / (1 << 20):g} MiB"
        case "reqps":
            return f"{value:g} /s"
        case _:
            return f"{value:,.6g}"
