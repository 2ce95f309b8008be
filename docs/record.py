"""Run commands in a terminal, and draw their output as an SVG image, docs/run.svg.

    python docs/record.py docs/run.svg "python train.py data=text data.path=stories.txt" \\
        'python generate.py "Once upon a time"'

The commands run one after the other, with the Python interpreter that runs this script. If a line
was overwritten, such as a progress bar, only its final state is drawn. If the output of a command
is long, only its first and last lines are drawn.
"""

import os
import pty
import re
import shlex
import sys
import textwrap
from html import escape
from pathlib import Path

COLUMNS = 104
HEAD = 9  # number of lines drawn from the beginning of a long output
TAIL = 17  # number of lines drawn from the end of a long output
LINE_HEIGHT = 17
CHARACTER_WIDTH = 7.83  # in pixels, for a font size of 13 pixels
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BACKGROUND, TEXT, PROMPT = "#0d1117", "#c9d1d9", "#7ee787"


def record(command: str) -> list[str]:
    """Run a command in a terminal COLUMNS wide; return the lines that stay on the screen."""
    words = shlex.split(command)
    words[0] = sys.executable
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm"}
    chunks = []

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 65536)
        chunks.append(chunk)
        return chunk

    status = pty.spawn(words, read)
    if status != 0:
        raise SystemExit(f"{command}: exit {os.waitstatus_to_exitcode(status)}")
    text = CONTROL.sub("", b"".join(chunks).decode())
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        *_, last = [part for part in line.split("\r") if part.strip()] or [""]
        lines += textwrap.wrap(last, COLUMNS, drop_whitespace=False) or [""]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def shorten(lines: list[str]) -> list[str]:
    if len(lines) <= HEAD + TAIL + 1:
        return lines
    return [*lines[:HEAD], "...", *lines[-TAIL:]]


def draw(lines: list[tuple[str, str]]) -> str:
    """Return an SVG image of lines, each given as (color, text)."""
    width = round(COLUMNS * CHARACTER_WIDTH + 24)
    height = LINE_HEIGHT * len(lines) + 20
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">',
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>',
    ]
    for number, (color, text) in enumerate(lines):
        y = 24 + LINE_HEIGHT * number
        drawn.append(
            f'<text x="12" y="{y}" fill="{color}" xml:space="preserve">{escape(text)}</text>'
        )
    return "\n".join([*drawn, "</svg>\n"])


def main(file: str, *commands: str) -> None:
    lines = []
    for command in commands:
        lines.append((PROMPT, f"$ {command}"))
        lines += [(TEXT, line) for line in shorten(record(command))]
        lines.append((TEXT, ""))
    Path(file).write_text(draw(lines[:-1]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
