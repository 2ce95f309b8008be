"""Text from bytes, with errors that say where it is none."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path


def utf8_lines(file: Path) -> Iterator[str]:
    """Yield lines with their ends, unchanged but for a byte order mark; only \\n ends a line.

    Raises ValueError, with the line, for what is not UTF-8.
    """
    with file.open("rb") as opened:
        for number, raw in enumerate(opened, start=1):
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                place = f"{file} line {number} at byte {error.start}"
                raise ValueError(f"not UTF-8 ({place}). fix: iconv -t utf8") from None


def text_hash(text: str) -> str:
    """SHA-256 in hexadecimal: the same in every process, as Python's own hash is not."""
    return sha256(text.encode()).hexdigest()
