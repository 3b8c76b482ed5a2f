"""A learning curve as an SVG: success over training steps with its interval as a band. Written by hand, no library.

The picture brings its own background and follows `prefers-color-scheme`, so that it is readable in light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 76, 60, 76, 66  # margins around the plot, pixels
MOST_TICKS = 11

STYLE = """
  .paper { fill: #ffffff } .text { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d8dee4 }
  .axis { stroke: #57606a } .band { fill: #0969da; fill-opacity: 0.18 } .line { stroke: #0969da } .dot { fill: #0969da }
  .macro { stroke: #9a6700 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #30363d }
    .axis { stroke: #9198a1 } .band { fill: #58a6ff; fill-opacity: 0.25 } .line { stroke: #58a6ff } .dot { fill: #58a6ff }
    .macro { stroke: #d29922 }
  }
  text { font: 13px system-ui, sans-serif } .title { font-size: 16px; font-weight: 600 } .small { font-size: 12px }
"""


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation: shares in [0, 1], minutes of training before it (None when unknown)."""

    step: int
    minutes: float | None
    episodes: int
    won: int
    success: float
    low: float
    high: float
    macro: float


def x_of(step: float, last: int) -> float:
    """Horizontal place of a step, pixels."""
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)


def y_of(share: float) -> float:
    """Vertical place of a share in [0, 1], pixels; downwards."""
    return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - share)


def tick_points(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Evenly chosen evaluations that are labelled on the axis, at most `MOST_TICKS` and the last one always."""
    stride = -(-len(points) // MOST_TICKS)
    chosen = list(points[::stride])
    if chosen[-1] is not points[-1]:
        # The last label replaces the one before it when they would overlap.
        chosen[-1 if len(points) - 1 - points.index(chosen[-1]) < stride / 2 else len(chosen) :] = [points[-1]]
    return chosen


def curve_svg(points: Sequence[CurvePoint], title: str, subtitle: str) -> str:
    """The whole picture. Raises ValueError without a point."""
    if not points:
        raise ValueError("a curve needs a point")
    points = sorted(points, key=lambda point: point.step)
    last = points[-1].step
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT, 26, title, "text title", "start"),
        _text(LEFT, 46, subtitle, "faint small", "start"),
        *_vertical_axis(),
        *_horizontal_axis(tick_points(points), last),
        *_curves(points, last),
        *_ends(points, last),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, words: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _vertical_axis() -> list[str]:
    parts = []
    for percent in range(0, 101, 20):
        y = y_of(percent / 100)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "axis" if percent == 0 else "grid"))
        parts.append(_text(LEFT - 8, y + 4, f"{percent} %", "faint", "end"))
    return parts


def _horizontal_axis(ticks: Sequence[CurvePoint], last: int) -> list[str]:
    bottom = y_of(0.0)
    parts = [_text(LEFT - 14, bottom + 20, "step", "faint", "end")]
    if any(point.minutes is not None for point in ticks):
        parts.append(_text(LEFT - 14, bottom + 38, "minutes", "faint small", "end"))
    for point in ticks:
        x = x_of(point.step, last)
        parts.append(_line(x, bottom, x, bottom + 4, "axis"))
        parts.append(_text(x, bottom + 20, str(point.step), "text", "middle"))
        if point.minutes is not None:
            parts.append(_text(x, bottom + 38, f"{point.minutes:.0f}", "faint small", "middle"))
    return parts


def _curves(points: Sequence[CurvePoint], last: int) -> list[str]:
    def path(places: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x_of(step, last):.1f},{y_of(share):.1f}" for step, share in places)

    upper = [(point.step, point.high) for point in points]
    lower = [(point.step, point.low) for point in reversed(points)]
    macro, success = ([(p.step, p.macro) for p in points], [(p.step, p.success) for p in points])
    dots = [f'<circle class="dot" cx="{x_of(s, last):.1f}" cy="{y_of(share):.1f}" r="3.2"/>' for s, share in success]
    return [
        f'<polygon class="band" points="{path([*upper, *lower])}"/>',
        f'<polyline class="macro" fill="none" stroke-width="1.4" stroke-dasharray="4 4" points="{path(macro)}"/>',
        f'<polyline class="line" fill="none" stroke-width="2.4" stroke-linejoin="round" points="{path(success)}"/>',
        *dots,
    ]


def _ends(points: Sequence[CurvePoint], last: int) -> list[str]:
    """The success of the first and the last evaluation in figures."""
    first, final = points[0], points[-1]
    parts = [_text(x_of(first.step, last) + 6, y_of(first.success) + 20, f"{first.success:.0%}", "text", "start")]
    if final is not first:
        parts.append(
            _text(x_of(final.step, last) + 9, y_of(final.success) + 4, f"{final.success:.0%}", "text", "start")
        )
    return parts


def _legend() -> list[str]:
    y = 64.0
    return [
        _band_sample(LEFT, y),
        _text(LEFT + 30, y + 4, "success, 95 % Wilson interval", "text small", "start"),
        f'<line class="macro" stroke-width="1.4" stroke-dasharray="4 4" x1="{LEFT + 220}" y1="{y}" x2="{LEFT + 244}" '
        f'y2="{y}"/>',
        _text(LEFT + 250, y + 4, "mean over task types", "text small", "start"),
    ]


def _band_sample(x: float, y: float) -> str:
    return (
        f'<rect class="band" x="{x}" y="{y - 6}" width="24" height="12"/>'
        f'<line class="line" stroke-width="2.4" x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}"/>'
    )
