"""Record a command as an animated SVG: its output, line by line, at the times that it took, shortened.

python docs/images/record_terminal.py docs/images/demo.svg "verl demo --steps 30"

Pauses longer than `--longest-pause` seconds are shortened to it. The picture plays again from the start.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROWS, COLUMNS = 30, 118
LINE, CHAR, MARGIN, BAR = 17, 7.2, 16, 34  # pixels
BACKGROUND, TITLE, INK, FAINT, GREEN, YELLOW = "#0f172a", "#1e293b", "#e2e8f0", "#94a3b8", "#4ade80", "#facc15"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
REST_S = 6.0  # at the end, before it plays again


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    at: float  # seconds since the start


def record(command: str) -> list[Line]:
    """Run a command and return the lines that it prints, wrapped to the width of the terminal."""
    lines, start = [Line(f"$ {command}", 0.0)], time.monotonic()
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for printed in process.stdout:
        sys.stdout.write(printed)
        text, at = printed.rstrip().expandtabs(), time.monotonic() - start
        lines += [Line(text[i : i + COLUMNS], at) for i in range(0, max(1, len(text)), COLUMNS)]
    if process.wait():
        raise SystemExit(f"{command} failed")
    return lines


def shorten(lines: list[Line], longest_pause: float) -> list[Line]:
    """Cut pauses, so that nobody has to wait."""
    shortened, now, before = [], 0.6, 0.0
    for line in lines:
        now += min(line.at - before, longest_pause)
        before = line.at
        shortened.append(Line(line.text, now))
    return shortened


def draw(lines: list[Line], title: str) -> str:
    """Return the SVG: each line appears at its time, and the text moves up when the window is full."""
    width, height = MARGIN * 2 + COLUMNS * CHAR, BAR + MARGIN * 2 + ROWS * LINE
    total = lines[-1].at + REST_S
    percents = [100 * line.at / total for line in lines]
    appear = [
        f"@keyframes l{i}{{0%,{percent:.3f}%{{opacity:0}}{percent + 0.01:.3f}%,100%{{opacity:1}}}}"
        for i, percent in enumerate(percents)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" role="img" aria-label="{escape(title)}" font-family="{FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            "<style>",
            "text{white-space:pre}",
            f".l{{animation-duration:{total:.2f}s;animation-iteration-count:infinite}}",
            *appear,
            f"@keyframes up{{{_scroll(lines, total)}}}",
            f"#screen{{animation:up {total:.2f}s infinite step-end}}",
            "</style>",
            f'<rect width="{width:.0f}" height="{height}" rx="10" fill="{BACKGROUND}"/>',
            f'<path d="M0 {BAR}V10a10 10 0 0 1 10-10H{width - 10:.0f}a10 10 0 0 1 10 10V{BAR}Z" fill="{TITLE}"/>',
            *(
                f'<circle cx="{20 + 18 * i}" cy="{BAR // 2}" r="5.5" fill="{color}"/>'
                for i, color in enumerate(("#f87171", "#fbbf24", "#4ade80"))
            ),
            f'<clipPath id="window"><rect y="{BAR}" width="{width:.0f}" height="{height - BAR - 6}"/></clipPath>',
            '<g clip-path="url(#window)"><g id="screen">',
            *(
                f'<text class="l" style="animation-name:l{i}" x="{MARGIN}" y="{BAR + MARGIN + LINE * (i + 0.8):.1f}" '
                f'fill="{_color(line.text)}">{escape(line.text)}</text>'
                for i, line in enumerate(lines)
            ),
            "</g></g>",
            "</svg>\n",
        ]
    )


def _scroll(lines: list[Line], total: float) -> str:
    """Keyframes that move the text up by one line for each line that does not fit."""
    frames = ["0%{transform:translateY(0)}"]
    for i, line in enumerate(lines[ROWS:], start=1):
        frames.append(f"{100 * line.at / total:.3f}%{{transform:translateY(-{LINE * i}px)}}")
    last = LINE * max(0, len(lines) - ROWS)
    return "".join([*frames, f"100%{{transform:translateY(-{last}px)}}"])


def _color(text: str) -> str:
    if text.startswith("$ "):
        return GREEN
    if text.startswith("──"):
        return FAINT
    return YELLOW if re.match(r"\s*!", text) else INK


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("command")
    parser.add_argument("--longest-pause", type=float, default=0.7)
    options = parser.parse_args()
    recorded = shorten(record(options.command), options.longest_pause)
    options.target.write_text(draw(recorded, f"Recording of: {options.command}"), encoding="utf-8")
