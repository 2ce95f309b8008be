"""Prompt to text: sampling, batched decoding, streaming output."""

from inference.load import load
from inference.text import generate_text

__all__ = ["generate_text", "load"]
