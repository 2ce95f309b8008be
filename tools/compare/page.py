"""A page that is written as Markdown and as HTML at once; the HTML needs no other file."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import matplotlib
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
td { font-variant-numeric: tabular-nums }
th { font-size: .85rem }
td small { display: block; font-size: .75rem; line-height: 1.3; color: var(--faint);
           text-wrap: balance }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas }
th:first-child, td:first-child, tr > :nth-child(2):last-child { text-align: left }
.better small { color: var(--better) } .worse small { color: var(--worse) }
.not { color: var(--faint) }
.figures { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; flex: 0 1 36rem } figcaption { font-size: .9rem; color: var(--faint) }
svg { width: 100%; height: auto; fill: currentColor }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px }
"""


class Cell(NamedTuple):
    """A cell of a table: a value, what is said of it, and a verdict, which colors it."""

    value: str
    note: str = ""
    verdict: str = ""
    is_best: bool = False


class Page:
    """Blocks of a page, in order, in both formats."""

    def __init__(self, title: str):
        self.markdown = [f"# {title}"]
        head = '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        head += '<meta name="viewport" content="width=device-width">'
        head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
        self.html = [head, f"<h1>{escape(title)}</h1>"]

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

    def figures(self, figures: dict[Path, tuple[Figure, str]]) -> None:
        """Saves figures by their paths, as PNG for Markdown; the HTML has them side by side.

        There they are SVG whose black has the color of the text, for light and dark screens.
        """
        self.html.append('<div class="figures">')
        for path, (figure, caption) in figures.items():
            figure.savefig(path, dpi=150)
            self.add(f"![{caption}]({path.name})\n{caption}", svg_figure(figure, path, caption))
        self.html.append("</div>")

    def table(self, header: list[str], rows: list[list]) -> None:
        """Adds a table whose cells may be of any type."""
        self.cells(header, [[Cell(str(value)) for value in row] for row in rows])

    def cells(self, header: list[str], rows: list[list[Cell]]) -> None:
        """Adds a table of cells, the best in bold."""
        # In Markdown the first column is left-aligned, as in HTML by the style.
        markdown = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
        html = ["<table>", "<tr>", *[f"<th>{escape(text)}</th>" for text in header], "</tr>"]
        for row in rows:
            texts = []
            html.append("<tr>")
            for value, note, verdict, is_best in row:
                texts.append(", ".join(filter(None, [f"**{value}**" if is_best else value, note])))
                inner = f"<b>{escape(value)}</b>" if is_best else escape(value)
                if note:
                    unbroken = escape(note).replace(" ± ", "&nbsp;±&nbsp;")
                    inner += f"<small>{unbroken}</small>"
                html.append(f'<td class="{verdict}">{inner}</td>')
            html.append("</tr>")
            # A bar would end a cell in Markdown.
            markdown.append(f"| {' | '.join(text.replace('|', '/') for text in texts)} |")
        html.append("</table>")
        self.add("\n".join(markdown), "\n".join(html))

    def write(self, folder: Path) -> None:
        """Writes report.md and report.html."""
        (folder / "report.md").write_text("\n\n".join(self.markdown) + "\n")
        (folder / "report.html").write_text("\n".join([*self.html, "</html>\n"]))


def svg_figure(figure: Figure, path: Path, caption: str) -> str:
    """Draws a figure as SVG inside HTML. Its black becomes the color of the text around it."""
    buffer = StringIO()
    # Ids of one figure must not occur in another of the page.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    _, start, drawing = buffer.getvalue().partition("<svg")
    drawing = re.sub(r"<metadata>.*</metadata>|\sxmlns(:\w+)?=\S+", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("#000000", "currentColor").replace("fill: #ffffff", "fill: none")
    image = f'{start} role="img" aria-label="{escape(caption)}"{drawing}'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
