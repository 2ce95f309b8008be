"""A page that is written as Markdown and as HTML at once; the HTML needs no other file."""

from base64 import b64encode
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: right }
td { font-variant-numeric: tabular-nums }
th:first-child, td:first-child, :nth-child(2):last-child { text-align: left }
img { max-width: 100% }
pre { white-space: pre-wrap; font-size: 12px }
:root { color-scheme: light dark }
"""


class Page:
    """Blocks of a page, in order, in both formats."""

    def __init__(self, title: str):
        self.title = title
        self.markdown = [f"# {title}"]
        self.html = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self.markdown.append(f"## {text}")
        self.html.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self.markdown.append(text)
        self.html.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self.markdown.append(f"```\n{text}\n```")
        self.html.append(f"<pre>{escape(text)}</pre>")

    def figure(self, figure: Figure, path: Path) -> None:
        """Saves a figure, links it in Markdown and embeds it in the HTML."""
        figure.savefig(path, dpi=120)
        data = b64encode(path.read_bytes()).decode()
        self.markdown.append(f"![]({path.name})")
        self.html.append(f'<img alt="{path.stem}" src="data:image/png;base64,{data}">')

    def table(self, header: list[str], rows: list[list]) -> None:
        """Adds a table whose cells may be of any type; a bar would end a cell in Markdown."""
        # In Markdown the first column is left-aligned, as in HTML by the style.
        lines = []
        for row in (header, *rows):
            cells = [str(cell).replace("|", "/") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        lines.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
        self.markdown.append("\n".join(lines))

        self.html.append("<table>")
        self.html.append(html_row(header, "th"))
        self.html += [html_row(row, "td") for row in rows]
        self.html.append("</table>")

    def write(self, folder: Path) -> None:
        """Writes report.md and report.html."""
        (folder / "report.md").write_text("\n\n".join(self.markdown) + "\n")
        title = f"<title>{escape(self.title)}</title>"
        head = f'<html lang="en"><meta charset="utf-8">{title}<style>{STYLE}</style>'
        lines = ["<!doctype html>", head, *self.html, "</html>"]
        (folder / "report.html").write_text("\n".join(lines) + "\n")


def html_row(row: list, tag: str) -> str:
    cells = [f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row]
    return f"<tr>{''.join(cells)}</tr>"
