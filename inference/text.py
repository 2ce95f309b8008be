"""Text in and out: sequences that detokenize as they grow, stop texts, and streaming to stdout."""

import json
import math
import sys
from collections import deque
from collections.abc import Iterator
from time import perf_counter

from common.errors import user_input
from data.tokenizer import Tokenizer
from inference.engine import Sequence
from model.cache import Cache


class StreamingText(Sequence):
    """A sequence whose generated `text` grows with its tokens and ends before the first stop text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: list[int],
        max_new_tokens: int,
        *,
        seed: int = 0,
        stop_texts: list[str],
        prompt: str = "",
        num_cached: int = 0,
    ):
        super().__init__(
            tokens, max_new_tokens, seed=seed, eos=tokenizer.eos, num_cached=num_cached
        )
        self.detokenizer = StreamingDetokenizer(tokenizer, tokens[-1:])
        self.stop_texts = stop_texts
        self.prompt = prompt
        self.text = ""
        self.pending = ""  # text that may be the beginning of a stop text
        self.num_printed = 0  # characters
        self.is_prompt_printed = False

    def append(self, token: int) -> None:
        super().append(token)
        if self.finish_reason != "eos":
            self.pending += self.detokenizer.push(token)
        if self.is_finished:
            self.pending += self.detokenizer.pending_text()

        # Pass on what is pending, but for a stop text and what may become one.
        end = self.find_stop()
        if end is not None:
            self.finish_reason = "stop"
        else:
            end = len(self.pending)
            if not self.is_finished:
                end -= self.partial_stop_length()
        self.text += self.pending[:end]
        self.pending = self.pending[end:]

    def find_stop(self) -> int | None:
        """Return where the first stop text begins in the pending text."""
        starts = [self.pending.find(stop) for stop in self.stop_texts]
        return min((start for start in starts if start >= 0), default=None)

    def partial_stop_length(self) -> int:
        """Return how many characters at the end of the pending text may begin a stop text."""
        for length in range(len(self.pending), 0, -1):
            end = self.pending[-length:]
            if any(stop.startswith(end) for stop in self.stop_texts):
                return length
        return 0

    def print(self) -> None:
        """Print what is new; on a terminal, the prompt goes first, dimmed, to standard error."""
        if self.prompt and not self.is_prompt_printed and sys.stderr.isatty():
            print(f"\033[2m{self.prompt}\033[0m", end="", file=sys.stderr, flush=True)
        self.is_prompt_printed = True
        end = "\n" if self.is_finished else ""
        print(self.text[self.num_printed :], end=end, flush=True)
        self.num_printed = len(self.text)

    def print_json(self) -> None:
        """Print a line of JSON, once the text is finished."""
        if self.is_finished:
            line = {"prompt": self.prompt, "text": self.text}
            print(json.dumps(line, ensure_ascii=False), flush=True)


def print_stream(generated: Iterator[StreamingText], is_json: bool) -> tuple[int, float]:
    """Print texts in the order in which they begin, each as it grows.

    `generated` yields a text each time it has a new token. Returns the number of tokens, and the
    time of the first by `perf_counter` (NaN without a token).
    """
    num_tokens = 0
    first_token_time = math.nan
    unprinted = deque()  # texts that have begun; all but the first wait
    for text in generated:
        num_tokens += 1
        if num_tokens == 1:
            first_token_time = perf_counter()
        if text.num_generated == 1:
            unprinted.append(text)

        # Print the first text, and, where it is finished, what those behind it have so far.
        while unprinted:
            current = unprinted[0]
            if is_json:
                current.print_json()
            else:
                current.print()
            if not current.is_finished:
                break
            unprinted.popleft()
    return num_tokens, first_token_time


def read_turns(
    tokenizer: Tokenizer,
    context: int,
    cache: Cache,
    max_new_tokens: int,
    seed: int,
    stop_texts: list[str],
) -> Iterator[StreamingText]:
    """Yield a text for each line of standard input, which continues the text before it.

    What the cache holds of the text before is not prefilled again.
    """
    tokens = [tokenizer.bos]
    turn = 0
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        with user_input():
            line = decode_utf8(sys.stdin.buffer.readline())
            new_tokens = tokenizer.encode(line.rstrip("\r\n"))
        if not line:
            return
        if not new_tokens:
            continue

        # The cache holds the tokens of the text before, unless their beginning has to go.
        tokens = tokens + new_tokens
        num_cached = int(cache.lengths[0])
        if len(tokens) > context:
            tokens = truncate_left(tokens, context)
            num_cached = 0
        text = StreamingText(
            tokenizer,
            tokens,
            max_new_tokens,
            seed=sample_seed(seed, turn),
            stop_texts=stop_texts,
            num_cached=num_cached,
        )
        yield text

        tokens = text.tokens
        if tokens[-1] == tokenizer.eos:  # the next line begins a document
            tokens = [*tokens, tokenizer.bos]
        turn += 1


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of a prompt's sample from that of the command."""
    return (seed * 1_000_003 + sample) % 2**63


def decode_utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        problem = f"the prompt is not UTF-8 (at byte {error.start})"
        raise ValueError(f"{problem}. fix: iconv -f latin1 -t utf8") from None


def truncate_left(tokens: list[int], context: int) -> list[int]:
    """Return the tokens, or the last `context` - 1 of them, with a warning, if they do not fit.

    BOS is then cut off too, and one place is left for the first new token.
    """
    if len(tokens) <= context:
        return tokens
    problem = f"a text of {len(tokens)} tokens, the model's context is {context}"
    print(f"warning: {problem}: its end is used", file=sys.stderr)
    return tokens[1 - context :]


class StreamingDetokenizer:
    """Turns tokens into text as soon as it is certain: a character's bytes wait for the last one.

    `prefix` holds the token before the first one, if any: decoded behind it, a word keeps the
    space in front of it, which the tokenizer may drop at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prefix: list[int]):
        self.tokenizer = tokenizer
        self.prefix = prefix
        self.pending: list[int] = []

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        self.pending.append(token)
        text = self.pending_text()
        if text.endswith("\ufffd"):  # bytes of a character that is not complete
            return ""
        self.prefix = self.pending[-1:]
        self.pending = []
        return text

    def pending_text(self) -> str:
        """Decode the tokens whose text was not returned yet."""
        before = self.tokenizer.decode(self.prefix)
        return self.tokenizer.decode(self.prefix + self.pending)[len(before) :]
