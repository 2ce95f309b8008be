"""Text out: sequences to texts that grow with them, up to a stop text; returned or printed."""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from time import perf_counter

from data.tokenizer import Tokenizer
from inference.batch import Sequence
from inference.engine import generate, new_cache
from inference.prompts import new_sequences
from inference.sampling import sample
from model.transformer import Transformer

HEADING_WIDTH = 70  # characters of a prompt


def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: str | list[str],
    *,
    max_new_tokens: int = 200,
    stop_texts: Iterable[str] = (),
    seed: int = 0,
    batch_size: int = 8,
    **options: float,
) -> list[str]:
    """Continue a prompt, or each of several; return the new texts, each up to a stop text.

    `options` are those of `sampling.sample`: temperature, top_k, top_p and so on.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    sequences = new_sequences(
        tokenizer, prompts, model.context, max_new_tokens=max_new_tokens, seed=seed
    )
    cache = new_cache(model, sequences, batch_size)
    generated = generate(model, sequences, partial(sample, **options), cache=cache)
    texts = dict.fromkeys(sequences, "")
    for text in stream_texts(generated, tokenizer, stop_texts):
        texts[text.sequence] = text.text
    return list(texts.values())


def stream_texts(
    generated: Iterator[Sequence], tokenizer: Tokenizer, stop_texts: Iterable[str]
) -> Iterator["StreamingText"]:
    """Yield the text of a sequence each time that this has a new token; stop it at a stop text."""
    texts = {}
    for sequence in generated:
        if sequence not in texts:
            texts[sequence] = StreamingText(sequence, tokenizer, stop_texts)
        texts[sequence].update()
        yield texts[sequence]


class StreamingText:
    """What a sequence says after its prompt: `text` grows and ends before the first stop text."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, stop_texts: Iterable[str]):
        self.sequence = sequence
        self.detokenizer = StreamingDetokenizer(tokenizer, sequence.tokens[-2:-1])
        self.stop_texts = stop_texts
        self.text = ""
        self.unprinted = ""  # what is new in `text`
        self.pending = ""  # text that may be the beginning of a stop text

    def update(self) -> None:
        """Add the newest token of the sequence."""
        sequence = self.sequence
        if sequence.finish_reason != "eos":
            self.pending += self.detokenizer.push(sequence.tokens[-1])
        if sequence.is_finished:
            self.pending += self.detokenizer.pending_text()

        # Pass on what is pending, but for a stop text and what may become one.
        starts = [self.pending.find(stop) for stop in self.stop_texts if stop in self.pending]
        end = len(self.pending)
        if starts:
            sequence.stop()
            end = min(starts)
        elif not sequence.is_finished:
            end -= self.partial_stop_length()
        self.text += self.pending[:end]
        self.unprinted += self.pending[:end]
        self.pending = self.pending[end:]

    def partial_stop_length(self) -> int:
        """Return how many characters at the end of the pending text may begin a stop text."""
        for length in range(len(self.pending), 0, -1):
            end = self.pending[-length:]
            if any(stop.startswith(end) for stop in self.stop_texts):
                return length
        return 0


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


def print_texts(
    texts: Iterator[StreamingText], *, is_json: bool, has_headings: bool
) -> tuple[int, float]:
    """Print texts in the order in which they begin, each as it grows, or in JSON once finished.

    `texts` yields a text each time it has a new token. A heading has the text's number and prompt.
    Returns the number of tokens, and the time of the first by `perf_counter` (NaN without a token).
    """
    num_texts = 0
    num_tokens = 0
    first_token_time = math.nan
    unfinished = deque()  # texts that have begun; all but the first wait
    for text in texts:
        num_tokens += 1
        if num_tokens == 1:
            first_token_time = perf_counter()
        if text.sequence.num_generated == 1:
            num_texts += 1
            if has_headings:
                prompt = " ".join(text.sequence.prompt.split())[:HEADING_WIDTH]
                text.unprinted = f"--- {num_texts}: {prompt}\n{text.unprinted}"
            unfinished.append(text)

        # Print the first text, and, where it is finished, what those behind it have so far.
        while unfinished:
            current = unfinished[0]
            is_finished = current.sequence.is_finished
            if not is_json:
                print(current.unprinted, end="\n" if is_finished else "", flush=True)
                current.unprinted = ""
            elif is_finished:
                line = {"prompt": current.sequence.prompt, "text": current.text}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            if not is_finished:
                break
            unfinished.popleft()
    return num_tokens, first_token_time
