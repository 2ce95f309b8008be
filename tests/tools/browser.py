"""Open pages in a real browser, measure which parts are readable, and click on column titles."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"needs a browser on PATH: one of {', '.join(BROWSERS)}"
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
FLAGS += ("--no-first-run", "--window-size=1400,1000")
HEIGHT = 800  # pixels
# Unlike a window, a frame can have any width.
FRAME = '<iframe data-name="{name}" style="width: {width}px; height: {height}px" srcdoc="{page}">'
# After loading, measure every frame and write the results as the page's text.
MEASURE = """
const describe = element => element.tagName.toLowerCase() + ": " + element.textContent.slice(0, 60);

// Words that begin on one line and end on another, and words that stick out of their cell.
function damagedWords(document) {
  const damaged = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("script, style, svg")) continue;
    const cell = node.parentElement.closest("td, th");
    for (const match of node.data.matchAll(/[\\p{L}\\p{N}_.]+/gu)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const boxes = [...range.getClientRects()];
      const isBroken = new Set(boxes.map(box => Math.round(box.top))).size > 1;
      const box = cell && cell.getBoundingClientRect();
      const isOutside = cell && boxes.some(
        each => each.left < box.left - 1 || each.right > box.right + 1);
      if (isBroken || isOutside) damaged.push(match[0]);
    }
  }
  return damaged;
}

function measure(frame) {
  const window = frame.contentWindow;
  const document = frame.contentDocument;
  const root = document.documentElement;
  const find = selector => [...document.querySelectorAll(selector)];
  const result = {
    width: window.innerWidth,
    height: window.innerHeight,
    openDetails: find("details[open]").length,
    numDetails: find("details").length,
    figures: find("svg").filter(svg => svg.checkVisibility())
      .map(svg => svg.getBoundingClientRect())
      .map(box => ({top: box.top, height: box.height, width: box.width})),
    answers: find("p.answer").map(p => ({bottom: p.getBoundingClientRect().bottom,
                                         text: p.textContent})),
  };
  // All words count, those in folded parts too.
  for (const details of find("details")) details.open = true;
  result.damaged = damagedWords(document);
  result.overflow = root.scrollWidth - root.clientWidth;
  result.boxes = find(".scroll").map(box => ({isWide: box.scrollWidth > box.clientWidth,
                                              overflow: window.getComputedStyle(box).overflowX}));

  // Click on each title of the first table, twice.
  result.sorted = find("table").slice(0, 1).flatMap(table =>
    [...table.tHead.rows[0].cells].map((header, column) => {
      const cells = () => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
      const button = header.querySelector("button");
      const states = [];
      for (let click = 0; click < 2; click++) {
        if (button) button.click();
        states.push({state: header.getAttribute("aria-sort"), cells: cells()});
      }
      const marked = table.querySelectorAll("[aria-sort]").length;
      return {title: header.textContent, states, marked};
    }));
  return result;
}

addEventListener("load", () => {
  const results = {};
  for (const frame of document.querySelectorAll("iframe"))
    results[frame.dataset.name] = measure(frame);
  const output = document.createElement("pre");
  output.id = "results";
  output.textContent = JSON.stringify(results);
  document.body.replaceChildren(output);
});
"""


def look_at(pages: dict[str, str], widths: tuple[int, ...], folder: Path) -> dict[str, dict]:
    """Open pages at these widths in pixels; return the results of MEASURE by "NAME WIDTH"."""
    frames = []
    for name, page in pages.items():
        for width in widths:
            frame = {"name": f"{name} {width}", "width": width, "height": HEIGHT}
            frames.append(FRAME.format(**frame, page=escape(page)) + "</iframe>")
    style = "<style>iframe { border: 0; display: block }</style>"
    file = folder / "frames.html"
    file.write_text(
        f'<!doctype html><meta charset="utf-8">{style}<body>{"".join(frames)}'
        f"<script>{MEASURE}</script>",
        encoding="utf-8",
    )
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", str(file)]
    dump = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", timeout=120
    ).stdout
    return json.loads(unescape(re.search('<pre id="results">(.*?)</pre>', dump, re.DOTALL)[1]))
