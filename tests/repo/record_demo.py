"""Record scripts/demo in a terminal, and draw the recording as an animated SVG.

The demo runs in a pseudo-terminal; `pyte` keeps its screen. Each changed screen is a frame, and the frames stand side
by side in a strip that CSS moves. The picture uses no script and no font of another host. Pauses are shortened.
"""

import fcntl
import math
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

import pyte

from tests.repo.tree import ROOT

COLUMNS: Final = 100
ROWS: Final = 32
FRAME_S: Final = 0.5
"""Seconds between two frames of the recording, at least."""

QUIET_S: Final = 0.05
"""Seconds without output after which a screen is complete."""

PAUSE_S: Final = 1.5
"""Seconds that a frame is shown, at most."""

LAST_S: Final = 8.0
"""Seconds that the last frame is shown."""

CELL: Final = (8, 17)
"""Width and height of a character, pixels."""

MARGIN: Final = 12

COLOURS: Final = {
    "default": "#d4d8e0", "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#ffffff",
}  # fmt: skip

Run = tuple[int, str, str, bool]
"""Column, text, colour, and whether it is bold."""

Line = tuple[Run, ...]


class Frame(NamedTuple):
    """Screen with the time at which it appeared, seconds."""

    at_s: float
    lines: tuple[Line, ...]


def record(command: list[str]) -> Iterator[tuple[float, bytes]]:
    """Run a command in a pseudo-terminal; yield the time and content of each output.

    Raises:
        SystemExit: The command failed.
    """
    started_s = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux reports the end of a terminal's output
            break
        if not data:
            break
        yield time.monotonic() - started_s, data
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"docs: {' '.join(command)} ended with {code}")


def frames(outputs: list[tuple[float, bytes]]) -> list[Frame]:
    """Return the screens that the outputs show one after the other."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    found: list[Frame] = []
    times_s = [at_s for at_s, _ in outputs[1:]]
    for (at_s, data), after_s in zip(outputs, [*times_s, math.inf], strict=True):
        stream.feed(data)
        if after_s - at_s < QUIET_S:
            continue
        lines = tuple(_line(screen, row) for row in range(ROWS))
        if found and at_s - found[-1].at_s < FRAME_S:
            found[-1] = Frame(found[-1].at_s, lines)  # the last screen of a burst is what a reader sees
        elif not found or lines != found[-1].lines:
            found.append(Frame(at_s, lines))
    return found


def _line(screen: pyte.Screen, row: int) -> Line:
    """Return a row of the screen as runs of one style, without blanks at the ends."""
    runs: list[Run] = []
    cells = screen.buffer[row]
    for column in range(COLUMNS):
        cell = cells[column]
        colour = COLOURS.get(cell.fg) or f"#{cell.fg}"
        if runs and runs[-1][2:] == (colour, cell.bold):
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, colour, cell.bold)
        else:
            runs.append((column, cell.data, colour, cell.bold))
    stripped = [(column + len(text) - len(text.lstrip()), text.strip(), *style) for column, text, *style in runs]
    return tuple((column, text, colour, bold) for column, text, colour, bold in stripped if text)


def draw(shown: list[Frame]) -> str:
    """Return an SVG that plays the frames in a loop."""
    durations_s = [min(after.at_s - frame.at_s, PAUSE_S) for frame, after in zip(shown, shown[1:], strict=False)]
    durations_s.append(LAST_S)
    width, height = COLUMNS * CELL[0] + 2 * MARGIN, ROWS * CELL[1] + 2 * MARGIN
    ids: dict[Line, int] = {}
    strip = []
    for number, frame in enumerate(shown):
        strip.append(f'<g transform="translate({number * width} 0)">')
        for row, line in enumerate(frame.lines):
            if line:
                name = ids.setdefault(line, len(ids))
                strip.append(f'<use href="#l{name}" y="{row * CELL[1]}"/>')
        strip.append("</g>")
    total_s, at_s, steps = sum(durations_s), 0.0, []
    for number, duration_s in enumerate(durations_s):
        steps.append(f"{100 * at_s / total_s:.2f}%{{transform:translateX(-{number * width}px)}}")
        at_s += duration_s
    last = f"translateX(-{(len(shown) - 1) * width}px)"
    style = (
        f"text{{font:13px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}}"
        f".b{{font-weight:bold}}.s{{animation:play {total_s:.1f}s step-end infinite}}"
        f"@keyframes play{{{''.join(steps)}100%{{transform:{last}}}}}"
        f"@media (prefers-reduced-motion:reduce){{.s{{animation:none;transform:{last}}}}}"
    )
    symbols = [f'<g id="l{name}">{"".join(map(_text, line))}</g>' for line, name in ids.items()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>Recording of scripts/demo: ten jobs, a killed leader, and every result checked</title>",
            f"<style>{style}</style>",
            f'<defs>{"".join(symbols)}<clipPath id="c"><rect width="{width}" height="{height}"/></clipPath></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#1e222a"/>',
            '<g clip-path="url(#c)"><g class="s">',
            *strip,
            "</g></g></svg>\n",
        ]
    )


def _text(run: Run) -> str:
    """Return a run as an element whose width does not depend on the font."""
    column, text, colour, bold = run
    kind = ' class="b"' if bold else ""
    return (
        f'<text x="{MARGIN + column * CELL[0]}" y="{MARGIN + 13}"{kind} fill="{colour}" '
        f'textLength="{len(text) * CELL[0]}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )


def record_demo(target: Path) -> None:
    """Record the demo into a file.

    Raises:
        SystemExit: The demo failed.
    """
    shown = frames(list(record([str(ROOT / "scripts" / "demo")])))
    target.parent.mkdir(exist_ok=True)
    target.write_text(draw(shown), encoding="utf-8")
    print(f"docs: {len(shown)} frames in {target.relative_to(ROOT)}, {target.stat().st_size // 1024} KiB")
