"""A page of HTML that needs no other file and no script."""

import re
from html import escape
from io import StringIO
from typing import NamedTuple

from matplotlib import rc_context
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
.better { color: var(--better) } .worse { color: var(--worse) } .cannot { color: var(--faint) }
figure { display: inline-block; width: min(36rem, 100%); margin: 0 1rem 1rem 0 }
figcaption { font-size: .9rem; color: var(--faint) }
svg { width: 100%; height: auto; fill: currentColor }
"""


class Cell(NamedTuple):
    """A cell of a table: a value, what is said of it, and a verdict, which colors it."""

    value: str
    note: str = ""
    verdict: str = ""

    def html(self) -> str:
        note = f"<small>{escape(self.note)}</small>"
        return f'<td class="{self.verdict}"><span>{escape(self.value)}</span>{note}</td>'


Row = dict[str, Cell]  # by the titles of the columns
EMPTY = Cell("")


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

    def figure(self, figure: Figure, caption: str) -> str:
        """Add a figure, and return its SVG. Its black becomes the color of the text around it."""
        buffer = StringIO()
        # The names of its parts follow from their order, and not from chance.
        with rc_context({"svg.hashsalt": str(len(self.blocks))}):
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        _, tag, drawing = buffer.getvalue().partition("<svg")
        drawing = re.sub("<metadata>.*</metadata>", "", drawing, flags=re.DOTALL)
        svg = tag + drawing.replace("#000000", "currentColor")
        caption = escape(caption)
        self.blocks.append(f"<figure>{svg}<figcaption>{caption}</figcaption></figure>")
        return svg

    def table(self, rows: list[Row]) -> None:
        """Add a table with the columns of all rows; where a row has none, its cell is empty."""
        titles = titles_of(rows)
        lines = ["".join(f"<th>{escape(title)}</th>" for title in titles)]
        for row in rows:
            lines.append("".join(row.get(title, EMPTY).html() for title in titles))
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        self.blocks.append(f"<table>\n{body}\n</table>")


def titles_of(rows: list[Row]) -> list[str]:
    """The titles of all columns, in the order in which they come."""
    return list(dict.fromkeys(title for row in rows for title in row))


def markdown(rows: list[Row]) -> str:
    """The values of a table, without what notes say, in Markdown."""
    titles = [
        title for title in titles_of(rows) if any(title in row and row[title].value for row in rows)
    ]
    lines = [titles, ["---"] * len(titles)]
    lines += [[row.get(title, EMPTY).value for title in titles] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
