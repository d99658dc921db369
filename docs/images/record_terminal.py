"""Record a command as an animated SVG: its output, line by line, at the times that it took, shortened.

python docs/images/record_terminal.py docs/images/demo.svg "verl demo --steps 25"

Pauses longer than `--longest-pause` seconds are shortened to it. The picture plays again from the start.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROWS, COLUMNS = 30, 118
LINE, CHAR, MARGIN, BAR = 17, 7.2, 16, 34  # pixels
BACKGROUND, TITLE, INK, FAINT, GREEN = "#0f172a", "#1e293b", "#e2e8f0", "#94a3b8", "#4ade80"
COLORS = {31: "#f87171", 32: GREEN, 33: "#facc15", 34: "#60a5fa", 35: "#c084fc", 36: "#22d3ee"}  # of escape codes
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
REST_S = 6.0  # at the end, before it plays again


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    at: float  # seconds since the start


def record(command: str) -> list[Line]:
    """Run a command in a terminal of this size and return the lines that it prints."""
    lines, start = [Line(f"$ {command}", 0.0)], time.monotonic()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(command, shell=True, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with open(ours, encoding="utf-8", errors="replace") as output, suppress(OSError):  # a terminal ends with an error
        for printed in output:
            sys.stdout.write(printed)
            text, at = printed.rstrip().expandtabs(), time.monotonic() - start
            lines.append(Line(text, at))
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
                f'fill="{INK}">{_spans(line.text)}</text>'
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


def _spans(text: str) -> str:
    """Return the text with its colors: those of its escape codes, and green for the command."""
    if text.startswith("$ "):
        return f'<tspan fill="{GREEN}">{escape(text)}</tspan>'
    codes: set[int] = set()
    spans = []
    for part in re.split(r"(\x1b\[[\d;]*m)", text):
        if part.startswith("\x1b"):
            given = {int(code) for code in part[2:-1].split(";") if code}
            codes = codes | given if given and given != {0} else set()
        elif part:
            color = next((COLORS[code] for code in codes if code in COLORS), FAINT if 2 in codes else INK)
            weight = ' font-weight="bold"' if 1 in codes else ""
            spans.append(f'<tspan fill="{color}"{weight}>{escape(part)}</tspan>')
    return "".join(spans)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("command")
    parser.add_argument("--longest-pause", type=float, default=0.7)
    options = parser.parse_args()
    recorded = shorten(record(options.command), options.longest_pause)
    options.target.write_text(draw(recorded, f"Recording of: {options.command}"), encoding="utf-8")
