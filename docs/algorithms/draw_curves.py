"""Draws the learning curves of the pages beside it: FOLDER/NAME/metrics.jsonl of every run -> curves/NAME.svg.

make show-algorithms ARGS="--keep runs"
make show-distillation ARGS="--keep runs"
python docs/algorithms/draw_curves.py runs
python docs/algorithms/draw_curves.py docs/runs --target docs/runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CURVES = Path(__file__).parent / "curves"
TRAINED = "reward/mean"
Points = list[tuple[float, float]]

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 616, 52, 252  # of the plot
INK, FAINT, GRID, BLUE, GREY = "#1f2937", "#6b7280", "#e5e7eb", "#2563eb", "#a8b3c4"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Curve:
    """A run: (step, value) of the held-out accuracy and of the mean reward in training."""

    name: str
    held_out: Points
    trained: Points

    @classmethod
    def read(cls, run: Path) -> Curve:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

        def points(metric: str) -> Points:
            return [(line["step"], line[metric]) for line in lines if isinstance(line.get(metric), int | float)]

        held_out = {name for line in lines for name in line if name.startswith("val/") and name.endswith("/mean@1")}
        return cls(run.name, points(min(held_out, default="")), points(TRAINED))


@dataclass(frozen=True)
class Frame:
    """From steps and accuracies to places in the picture."""

    steps: float
    lowest: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.steps

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.lowest) / (1.0 - self.lowest)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


def svg(curve: Curve) -> str:
    """The picture: on a light card of its own, so that it can be read on a dark page too."""
    (_, start), (last, end) = curve.held_out[0], curve.held_out[-1]
    lowest = 0.0
    while min(value for _, value in curve.trained + curve.held_out) < lowest:
        lowest -= 0.25
    frame = Frame(max(step for step, _ in curve.trained + curve.held_out) or 1, lowest)
    summary = f"{curve.name}: held-out accuracy from {start:.2f} to {end:.2f} in {last:g} steps"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{summary}" font-family="{FONT}" font-size="12">',
        f"<title>{summary}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" stroke="{GRID}"/>',
        *_axes(frame),
        *_legend(curve.name),
        f'<polyline points="{frame.path(curve.trained)}" fill="none" stroke="{GREY}" stroke-width="1.5"/>',
        f'<polyline points="{frame.path(curve.held_out)}" fill="none" stroke="{BLUE}" stroke-width="2.5" '
        'stroke-linejoin="round"/>',
        *(
            f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="4" fill="{BLUE}" stroke="#ffffff" '
            'stroke-width="1.5"/>'
            for step, value in curve.held_out
        ),
        _value(frame, curve.held_out[0], "start", above=False),
        _value(frame, curve.held_out[-1], "end", above=True),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(frame: Frame) -> Iterable[str]:
    count = round((1.0 - frame.lowest) / 0.25)
    for k in range(count + 1):
        value = frame.lowest + 0.25 * k
        y = frame.y(value)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:.2f}", FAINT, "end")
    stride = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if frame.steps / size <= 10)
    for step in range(0, int(frame.steps) + 1, stride):
        yield _text(frame.x(step), BOTTOM + 18, str(step), FAINT, "middle")
    yield _text((LEFT + RIGHT) / 2, HEIGHT - 12, "step", FAINT, "middle")


def _legend(name: str) -> Iterable[str]:
    yield f'<text x="{LEFT}" y="30" fill="{INK}" font-size="15" font-weight="600">{name}</text>'
    yield f'<line x1="346" x2="366" y1="26" y2="26" stroke="{BLUE}" stroke-width="2.5"/>'
    yield f'<circle cx="356" cy="26" r="4" fill="{BLUE}"/>'
    yield _text(372, 30, "held-out accuracy", INK)
    yield f'<line x1="490" x2="510" y1="26" y2="26" stroke="{GREY}" stroke-width="1.5"/>'
    yield _text(516, 30, "training reward", INK)


def _value(frame: Frame, point: tuple[float, float], anchor: str, above: bool) -> str:
    """The number at one end of the curve: a rising one has room below its start and above its end."""
    step, value = point
    y = frame.y(value)
    above = y > TOP + 6 if above else y > BOTTOM - 24
    return (
        f'<text x="{frame.x(step):.1f}" y="{y - 12 if above else y + 22:.1f}" fill="{BLUE}" font-size="14" '
        f'font-weight="600" text-anchor="{anchor}" paint-order="stroke" stroke="#ffffff" stroke-width="4">'
        f"{value:.2f}</text>"
    )


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def draw(folder: Path, target: Path = CURVES) -> list[str]:
    """One picture for every run of the folder that was validated more than once: their names."""
    target.mkdir(exist_ok=True)
    curves = [Curve.read(file.parent) for file in sorted(folder.glob("*/metrics.jsonl"))]
    shown = [curve for curve in curves if len(curve.held_out) > 1]
    for curve in shown:
        (target / f"{curve.name}.svg").write_text(svg(curve), encoding="utf-8")
    return [curve.name for curve in shown]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that `make show-algorithms` was given by --keep")
    parser.add_argument("--target", type=Path, default=CURVES)
    options = parser.parse_args()
    sys.stdout.write("drawn: " + " ".join(draw(options.folder, options.target)) + "\n")
