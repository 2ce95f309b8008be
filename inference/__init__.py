"""From prompts to text: sampling, batched decoding and streaming output."""

from inference.load import load as load
from inference.text import generate_text as generate_text
from inference.text import stream_text as stream_text
