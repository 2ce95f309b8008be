"""A page of HTML that needs no other file and no script."""

import re
from html import escape
from io import StringIO

from matplotlib import rc_context
from matplotlib.figure import Figure
from pandas import DataFrame, option_context

STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#6b6b6b, #a0a0a0) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0 }
th, td { padding: .3rem .4rem; border-bottom: 1px solid #8884; text-align: right;
         vertical-align: top }
td { font-size: .9rem; font-variant-numeric: tabular-nums }
th { font-size: .85rem }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas }
th:first-child, td:first-child, tr > :last-child { text-align: left }
figure { display: inline-block; width: min(36rem, 100%); margin: 0 1rem 1rem 0 }
figcaption { font-size: .9rem; color: var(--faint) }
svg { width: 100%; height: auto; fill: currentColor }
"""


Rows = list[dict[str, str]]  # by the titles of the columns; a row may lack some


class Page:
    """The blocks of the page of a comparison, in order, as HTML."""

    def __init__(self):
        self.blocks = [
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>Comparison</title><style>{STYLE}</style>\n<h1>Comparison</h1>"
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

    def table(self, rows: Rows) -> None:
        frame = DataFrame(rows).fillna("")
        with option_context("display.max_colwidth", None):
            self.blocks.append(frame.to_html(index=False, border=0))


def plain_table(rows: Rows) -> str:
    """A table for a terminal."""
    return DataFrame(rows).fillna("").to_string(index=False)
