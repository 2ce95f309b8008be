"""Reading the tables of a report."""

import re
from html import unescape


def table(page: str, number: int) -> dict[str, dict[str, str]]:
    """A table of report.html: cells by the first column and by the title of theirs."""
    block = re.findall(r"<table>\n(.*?)\n</table>", page, re.DOTALL)[number]
    header, *rows = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line) for line in block.splitlines()]
    return {plain(row[0]): dict(zip(header, map(plain, row), strict=True)) for row in rows}


def plain(cell: str) -> str:
    """The text of a cell, such as '*1.9952 ± 0.1779*, baseline'; what is bold has asterisks."""
    text = re.sub("</?b>", "*", cell.replace("<small></small>", "").replace("<small>", ", "))
    return unescape(re.sub("<.*?>", "", text)).replace("\N{NO-BREAK SPACE}", " ")
