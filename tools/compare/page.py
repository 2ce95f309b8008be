"""A page that is written as Markdown and as HTML at once; the HTML needs no other file."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#6b6b6b, #a0a0a0);
        --better: light-dark(#00609c, #6db9f2); --worse: light-dark(#a63d00, #f0a070) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0 }
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
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px }
"""


class Cell(NamedTuple):
    """A cell of a table: a value, what is said of it, and a verdict, which colors it."""

    value: str
    note: str = ""
    verdict: str = ""
    is_best: bool = False

    def markdown(self) -> str:
        value = f"**{self.value}**" if self.is_best else self.value
        text = f"{value}, {self.note}" if self.note else value
        return text.replace("|", "/")  # a bar would end the cell

    def html(self) -> str:
        tag = "b" if self.is_best else "span"
        # A value and its interval stay on one line.
        value = f"<{tag}>{escape(self.value).replace(' ± ', '&nbsp;±&nbsp;')}</{tag}>"
        return f'<td class="{self.verdict}">{value}<small>{escape(self.note)}</small></td>'


class Page:
    """Blocks of a page, in order, in both formats."""

    def __init__(self, title: str):
        self.markdown = [f"# {title}"]
        self.html = [
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f"<h1>{escape(title)}</h1>",
        ]

    def add(self, markdown: str, html: str) -> None:
        self.markdown.append(markdown)
        self.html.append(html)

    def heading(self, text: str) -> None:
        self.add(f"## {text}", f"<h2>{escape(text)}</h2>")

    @contextmanager
    def folded(self, text: str) -> Iterator[None]:
        """Adds a section that is folded away in HTML."""
        self.add(f"## {text}", f"<details><summary>{escape(text)}</summary>")
        yield
        self.html.append("</details>")

    def paragraph(self, text: str) -> None:
        self.add(text, f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self.add(f"```\n{text}\n```", f"<pre>{escape(text)}</pre>")

    def figure(self, figure: Figure, path: Path, caption: str) -> None:
        """Saves a figure as PNG for Markdown; the HTML has it as SVG."""
        figure.savefig(path, dpi=150)
        html = f"<figure>{svg(figure)}<figcaption>{escape(caption)}</figcaption></figure>"
        self.add(f"![{caption}]({path.name})\n{caption}", html)

    def table(self, header: list[str], rows: list[list]) -> None:
        """Adds a table whose cells may be of any type."""
        self.cells(header, [[Cell(str(value)) for value in row] for row in rows])

    def cells(self, header: list[str], rows: list[list[Cell]]) -> None:
        """Adds a table of cells, the best in bold."""
        # In Markdown the first column is left-aligned, as in HTML by the style.
        markdown = [" | ".join(header), "---" + "|---:" * (len(header) - 1)]
        html = ["".join(f"<th>{escape(text)}</th>" for text in header)]
        for row in rows:
            markdown.append(" | ".join(cell.markdown() for cell in row))
            html.append("".join(cell.html() for cell in row))
        lines = "\n".join(f"<tr>{line}</tr>" for line in html)
        self.add("\n".join(f"| {line} |" for line in markdown), f"<table>\n{lines}\n</table>")

    def write(self, folder: Path) -> None:
        """Writes report.md and report.html."""
        (folder / "report.md").write_text("\n\n".join(self.markdown) + "\n")
        (folder / "report.html").write_text("\n".join([*self.html, "</html>\n"]))


def svg(figure: Figure) -> str:
    """Draws a figure as SVG inside HTML. Its black becomes the color of the text around it."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    _, tag, drawing = buffer.getvalue().partition("<svg")
    drawing = re.sub("<metadata>.*</metadata>", "", drawing, flags=re.DOTALL)
    return f"{tag}{drawing}".replace("#000000", "currentColor")
