"""Reading the tables of a report."""

import re
from html import unescape


def table(page: str, number: int) -> dict[str, dict[str, str]]:
    """A table of report.html: cells by the first column and by the title of theirs."""
    block = re.findall(r"<table .*?</table>", page, re.DOTALL)[number]
    rows = re.findall(r"<tr.*?</tr>", block, re.DOTALL)
    header, *cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return {unescape(row[0]): dict(zip(header, map(unescape, row), strict=True)) for row in cells}
