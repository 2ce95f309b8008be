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
        self.markdown = [f"# {title}"]
        head = '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
        self.html = [head, f"<h1>{escape(title)}</h1>"]

    def add(self, markdown: str, html: str) -> None:
        self.markdown.append(markdown)
        self.html.append(html)

    def heading(self, text: str) -> None:
        self.add(f"## {text}", f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self.add(text, f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self.add(f"```\n{text}\n```", f"<pre>{escape(text)}</pre>")

    def figure(self, figure: Figure, path: Path) -> None:
        """Saves a figure, links it in Markdown and embeds it in the HTML."""
        figure.savefig(path, dpi=120)
        data = b64encode(path.read_bytes()).decode()
        image = f'<img alt="{path.stem}" src="data:image/png;base64,{data}">'
        self.add(f"![]({path.name})", image)

    def table(self, header: list[str], rows: list[list]) -> None:
        """Adds a table whose cells may be of any type."""
        markdown = []
        html = ["<table>"]
        for row in (header, *rows):
            # A bar would end a cell in Markdown.
            cells = [str(cell).replace("|", "/") for cell in row]
            markdown.append(f"| {' | '.join(cells)} |")
            tag = "th" if row is header else "td"
            html.append("<tr>")
            html += [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
            html.append("</tr>")
        html.append("</table>")
        # In Markdown the first column is left-aligned, as in HTML by the style.
        markdown.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
        self.add("\n".join(markdown), "\n".join(html))

    def write(self, folder: Path) -> None:
        """Writes report.md and report.html."""
        (folder / "report.md").write_text("\n\n".join(self.markdown) + "\n")
        (folder / "report.html").write_text("\n".join([*self.html, "</html>\n"]))
