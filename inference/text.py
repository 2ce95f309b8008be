"""Texts as they are read and printed: prompts to tokens, tokens to what is certain of their text."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

from common.errors import user_input
from data.tokenizer import Tokenizer
from inference.engine import Sequence
from model.cache import Cache


class StreamingText(Sequence):
    """Tokens go in, text comes out once no token to come can change it. `number` of all, `sample` of its prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        most: int,
        seed: int,
        stops: list[str],
        is_json: bool,
        number: int,
        sample: int,
        tokens: list[int],
        prompt: str,
        held: int = 0,
    ):
        super().__init__(tokens, most, key=(seed * 1_000_003 + sample) % 2**63, held=held)
        self.number, self.prompt, self.is_json = number, prompt, is_json
        self.stops, self.eos, self.stream = (
            stops,
            tokenizer.eos,
            StreamingDetokenizer(tokenizer, tokens[-1:]),
        )
        self.ready, self.unsure = "", ""  # text that stays, and what may become a stop

    def hear(self) -> None:
        """Its newest token."""
        ended = self.tokens[-1] == self.eos
        if not ended:
            self.unsure += self.stream.push(self.tokens[-1])
        if ended or self.done:
            self.unsure += self.stream.text()
        cut = min(
            (self.unsure.find(stop) for stop in self.stops if stop in self.unsure), default=None
        )
        self.done = self.done or ended or cut is not None
        begun = max(
            (n for stop in self.stops for n in range(len(stop)) if self.unsure.endswith(stop[:n])),
            default=0,
        )
        sure = cut if cut is not None else len(self.unsure) - (0 if self.done else begun)
        self.ready, self.unsure = self.ready + self.unsure[:sure], self.unsure[sure:]

    def show(self) -> None:
        """Prints what is ready: plain text at once, JSON when it is done."""
        if self.is_json:
            line = {"prompt": self.prompt, "text": self.ready}
            print(
                json.dumps(line, ensure_ascii=False) + "\n" if self.done else "", end="", flush=True
            )
            return
        if self.prompt and sys.stderr.isatty():
            print(f"\033[2m{self.prompt}\033[0m", end="", file=sys.stderr, flush=True)
        print(self.ready, end="\n" if self.done else "", flush=True)
        self.prompt = self.ready = ""


def print_stream(steps: Iterator[StreamingText]) -> tuple[int, float]:
    """Prints texts in their order, each as it grows -> how many tokens came, and when the first did."""
    made, first, current, met = 0, math.nan, 0, {}
    for text in steps:
        text.hear()
        made, first = made + 1, perf_counter() if made == 0 else first
        met[text.number] = text
        while current in met:
            met[current].show()
            if not met[current].done:
                break
            del met[current]
            current += 1
    return made, first


def read_turns(
    text: Callable[..., StreamingText], tokenizer: Tokenizer, context: int, cache: Cache
) -> Iterator[StreamingText]:
    """A text for each line of standard input, which goes on from the one before and from what the cache holds of it."""
    tokens, number = [tokenizer.bos], 0
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        with user_input():
            line = decode_utf8(sys.stdin.buffer.readline())
            new = tokenizer.encode(line.rstrip("\r\n"))
        if not line:
            return
        if not new:
            continue
        tokens = [*tokens, *new]
        said = text(number, number, tokens, "", int(cache.lengths[0]))
        if len(tokens) > context:
            said = text(number, number, truncate_left(tokens, context), "")
        yield said
        tokens, number = (
            said.tokens + [tokenizer.bos] * (said.tokens[-1] == tokenizer.eos),
            number + 1,
        )


def decode_utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt is not UTF-8 (at byte {error.start}). fix: convert it"
        ) from None


def truncate_left(tokens: list[int], context: int) -> list[int]:
    if len(tokens) <= context:
        return tokens
    told = f"warning: a text of {len(tokens)} tokens, the model's context is {context}: its end is used"
    print(told, file=sys.stderr)
    return tokens[1 - context :]


class StreamingDetokenizer:
    """Tokens, one at a time, to text as soon as it is certain: a character of several bytes waits for its last.

    `behind` is what comes before them: a word keeps its leading space where it is not the first.
    """

    def __init__(self, tokenizer: Tokenizer, behind: list[int]):
        self.tokenizer, self.before, self.pending = tokenizer, behind, []

    def push(self, token: int) -> str:
        self.pending.append(token)
        text = self.text()
        if text.endswith("\ufffd"):
            return ""
        self.before, self.pending = self.pending[-1:], []
        return text

    def text(self) -> str:
        """What is waiting. A piece is read behind the one before it, for a first piece may lose its leading space."""
        decode = self.tokenizer.decode
        return decode(self.before + self.pending)[len(decode(self.before)) :]
