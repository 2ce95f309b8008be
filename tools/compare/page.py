"""A self-contained HTML page."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO

from matplotlib import rc_context
from matplotlib.figure import Figure
from pandas import DataFrame

# A word is broken only if it is longer than a line of text. Tables that are wider than the screen
# scroll in separate boxes, and the figure is no taller than the screen.
STYLE = """
:root { color-scheme: light dark; --faint: light-dark(#5f5f5f, #a8a8a8); --line: #8885 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 1rem auto 4rem;
       padding: 0 1rem }
h1 { font-size: 1rem; font-weight: normal; color: var(--faint); margin: 0 }
h2 { font-size: 1rem; color: var(--faint); margin: 2rem 0 0; font-weight: normal }
p { margin: .5rem 0; max-width: 48rem; overflow-wrap: break-word }
p.answer { font-size: 1.35rem; line-height: 1.35; font-weight: 600 }
p.faint, figcaption { font-size: .9rem; color: var(--faint) }
figure { margin: 1rem 0; max-width: 40rem }
svg { display: block; width: 100%; height: auto; max-height: 78vh; fill: currentColor }
.scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
         vertical-align: top; font-size: .9rem; font-variant-numeric: tabular-nums }
thead th { vertical-align: bottom; min-width: 5rem }
th:first-child, .text { text-align: left }
th:first-child { position: sticky; left: 0; background: Canvas }
td { white-space: nowrap }
td.long { white-space: normal; min-width: 24rem }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
            text-align: inherit; cursor: pointer }
th button::after { content: "\\a0\\2195"; color: var(--faint) }
th[aria-sort=ascending] button::after { content: "\\a0\\2191" }
th[aria-sort=descending] button::after { content: "\\a0\\2193" }
details { border-top: 1px solid var(--line); padding: .4rem 0 }
summary { cursor: pointer; font-weight: 600 }
pre { overflow-x: auto; font-size: .85rem; line-height: 1.4 }
"""
# Clicking a column title sorts the table by that column: first ascending, then descending.
# In both directions, numbers come before words, and empty cells come last.
SCRIPT = """
function sortBy(header) {
  const table = header.closest("table");
  const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const text = row => row.cells[header.cellIndex].textContent.trim();
  const number = row => parseFloat(text(row).replaceAll(",", ""));
  const rank = row => text(row) === "" ? 2 : Number.isFinite(number(row)) ? 0 : 1;
  const compare = (a, b) =>
    rank(a) === 0 ? number(a) - number(b) : text(a).localeCompare(text(b));
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => rank(a) - rank(b) || direction * compare(a, b));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  table.tBodies[0].append(...rows);
}
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sortBy(button.parentElement));
"""
LONG = 40  # cells with more characters may have several lines
NUMBER = re.compile(r"[-+]?\d")  # the start of a cell with a number
UNKNOWN = ("", "n/a", "never")  # contents of cells without a number in a numeric column

Rows = list[dict[str, str]]  # by column title; a row may lack some columns


class Page:
    """The blocks of a comparison's page, in order, as HTML."""

    def __init__(self):
        self.blocks = [
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>Comparison</title><style>{STYLE}</style>"
        ]

    def html(self) -> str:
        return "\n".join([*self.blocks, f"<script>{SCRIPT}</script>", "</html>\n"])

    def paragraph(self, text: str, tag: str = "p", style: str = "") -> None:
        """Add a paragraph, or nothing if the text is empty."""
        if text:
            style = f' class="{style}"' if style else ""
            self.blocks.append(f"<{tag}{style}>{escape(' '.join(text.split()))}</{tag}>")

    def code(self, lines: list[str]) -> None:
        """Add preformatted lines. Long lines scroll horizontally."""
        self.blocks.append(f'<pre tabindex="0">{escape(chr(10).join(lines))}</pre>')

    @contextmanager
    def folded(self, title: str) -> Iterator[None]:
        """Hide the blocks that are added inside until the reader clicks on the title."""
        self.blocks.append(f"<details><summary>{escape(title)}</summary>")
        yield
        self.blocks.append("</details>")

    def figure(self, figure: Figure, caption: str) -> str:
        """Add a figure, and return its SVG. Black becomes the color of the surrounding text."""
        buffer = StringIO()
        # With a fixed salt, the ids in the SVG are not random; each figure has a different salt.
        with rc_context({"svg.hashsalt": str(len(self.blocks))}):
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        _, tag, drawing = buffer.getvalue().partition("<svg")
        drawing = re.sub("<metadata>.*</metadata>", "", drawing, flags=re.DOTALL)
        svg = tag + drawing.replace("#000000", "currentColor")
        caption = escape(caption)
        self.blocks.append(f"<figure>{svg}<figcaption>{caption}</figcaption></figure>")
        return svg

    def table(self, rows: Rows, sorted_by: str = "") -> None:
        """Add a table that scrolls separately; clicking a column title sorts by that column."""
        titles = list(dict.fromkeys(title for row in rows for title in row))
        header = ""
        body = ["" for _ in rows]
        for number, title in enumerate(titles):
            texts = [row.get(title, "") for row in rows]
            style = column_style(texts)
            state = ' aria-sort="ascending"' if title == sorted_by else ""
            button = f'<button type="button">{escape(title)}</button>'
            header += f'<th scope="col" class="{style}"{state}>{button}</th>'
            for index, text in enumerate(texts):
                if number == 0:
                    body[index] += f'<th scope="row">{escape(text)}</th>'
                else:
                    body[index] += f'<td class="{style}">{escape(text)}</td>'
        lines = "\n".join(f"<tr>{cells}</tr>" for cells in body)
        self.blocks.append(
            '<div class="scroll" tabindex="0"><table>\n'
            f"<thead><tr>{header}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
        )


def column_style(texts: list[str]) -> str:
    """Return the style of a column: its alignment, and whether its cells may wrap."""
    if all(NUMBER.match(text) or text in UNKNOWN for text in texts):
        return "number"
    return "text long" if max(map(len, texts)) > LONG else "text"


def plain_table(rows: Rows) -> str:
    """Format a table for a terminal."""
    return DataFrame(rows).fillna("").to_string(index=False)
