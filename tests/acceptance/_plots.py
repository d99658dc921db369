"""Bar charts as SVG files, for docs/benchmarks.md: figures of a run, next to those of what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH, LABEL, VALUE, ROW, BAR = 720, 230, 160, 26, 16
COLORS = ("#2563eb", "#9ca3af")  # ours, and the others


def draw_bars(path: Path, title: str, rows: Sequence[tuple[str, float, bool]], unit: str) -> None:
    """Write a chart with one bar per row: its label, its value, and whether it is ours."""
    longest = max(value for _, value, _ in rows)
    height = 40 + ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (label, value, is_ours) in enumerate(rows):
        y, length = 36 + ROW * index, (WIDTH - LABEL - VALUE) * value / longest
        number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        lines += [
            f'<text x="{LABEL - 8}" y="{y + 13}" font-size="12" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLORS[not is_ours]}"/>',
            f'<text x="{LABEL + length + 6:.1f}" y="{y + 13}" font-size="12">{number} {escape(unit)}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>", ""]))
