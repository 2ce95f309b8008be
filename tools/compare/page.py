"""A page of HTML that needs no other file and no script."""

import re
from html import escape
from io import StringIO
from typing import NamedTuple

from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#6b6b6b, #a0a0a0);
        --better: light-dark(#00609c, #6db9f2); --worse: light-dark(#a63d00, #f0a070) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0 }
th, td { padding: .3rem .4rem; border-bottom: 1px solid #8884; text-align: right;
         vertical-align: top }
td { font-size: .9rem; font-variant-numeric: tabular-nums }
th { font-size: .85rem }
td small { display: block; font-size: .75rem; line-height: 1.3; color: var(--faint);
           text-wrap: balance }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas }
th:first-child, td:first-child, tr > :nth-child(2):last-child { text-align: left }
.better small { color: var(--better) } .worse small { color: var(--worse) }
.not { color: var(--faint) }
figure { display: inline-block; width: min(36rem, 100%); margin: 0 1rem 1rem 0 }
figcaption { font-size: .9rem; color: var(--faint) }
svg { width: 100%; height: auto; fill: currentColor }
"""


class Cell(NamedTuple):
    """A cell of a table: a value, what is said of it, and a verdict, which colors it."""

    value: str
    note: str = ""
    verdict: str = ""
    is_best: bool = False

    def html(self) -> str:
        tag = "b" if self.is_best else "span"
        # A value and its interval stay on one line.
        value = escape(self.value).replace(" ± ", "&nbsp;±&nbsp;")
        note = f"<small>{escape(self.note)}</small>"
        return f'<td class="{self.verdict}"><{tag}>{value}</{tag}>{note}</td>'


class Page:
    """The blocks of a page, in order, as HTML."""

    def __init__(self, title: str):
        self.blocks = [
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
        ]

    def html(self) -> str:
        return "\n".join([*self.blocks, "</html>\n"])

    def paragraph(self, text: str, tag: str = "p") -> None:
        self.blocks.append(f"<{tag}>{escape(text)}</{tag}>")

    def figure(self, figure: Figure, caption: str) -> None:
        """Add a figure as SVG. Its black becomes the color of the text around it."""
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
        _, tag, drawing = buffer.getvalue().partition("<svg")
        drawing = re.sub("<metadata>.*</metadata>", "", drawing, flags=re.DOTALL)
        drawing = drawing.replace("#000000", "currentColor")
        caption = escape(caption)
        self.blocks.append(f"<figure>{tag}{drawing}<figcaption>{caption}</figcaption></figure>")

    def table(self, header: list[str], rows: list[list[Cell]]) -> None:
        lines = ["".join(f"<th>{escape(text)}</th>" for text in header)]
        for row in rows:
            lines.append("".join(cell.html() for cell in row))
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        self.blocks.append(f"<table>\n{body}\n</table>")

    def texts(self, header: list[str], rows: list[list[str]]) -> None:
        """Add a table of plain texts."""
        self.table(header, [[Cell(text) for text in row] for row in rows])
