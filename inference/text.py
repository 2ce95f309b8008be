"""Text out: sequences to texts that grow with them, up to a stop text; returned or printed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from data.tokenizer import Tokenizer
from inference.batch import Sequence
from inference.engine import Engine, new_cache
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
    stop: Callable[[], int] | None = None,
    **options: float,
) -> list[str]:
    """Continue a prompt, or each of several; return the new texts, each up to a stop text.

    `stop()` is called after each token: other than 0, it ends all texts with what they have.
    `options` are those of `sampling.sample`: temperature, top_k, top_p and so on.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    sequences = new_sequences(
        tokenizer, prompts, model.context, max_new_tokens=max_new_tokens, seed=seed
    )
    cache = new_cache(model, sequences, batch_size)
    generated = Engine(model, partial(sample, **options), cache).generate(sequences)
    texts = dict.fromkeys(sequences, "")
    for text in stream_texts(generated, tokenizer, stop_texts):
        texts[text.sequence] = text.text
        if stop is not None and stop():
            break
    return list(texts.values())


def stream_texts(
    generated: Iterator[Sequence], tokenizer: Tokenizer, stop_texts: Iterable[str]
) -> Iterator["StreamingText"]:
    """Yield the text of a sequence each time that this has a new token; stop it at a stop text."""
    texts = {}
    stop_texts = tuple(stop_texts)  # each sequence reads them
    for sequence in generated:
        if sequence not in texts:
            texts[sequence] = StreamingText(sequence, tokenizer, stop_texts)
        texts[sequence].update()
        yield texts[sequence]


class StreamingText:
    """What a sequence says after its prompt: `text` grows and ends before the first stop text.

    It is made when the sequence has its first new token.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, stop_texts: Iterable[str]):
        self.sequence = sequence
        self.tokenizer = tokenizer
        self.stop_texts = stop_texts
        self.text = ""
        self.unprinted = ""  # what is new in `text`
        self.decoded = ""  # `text`, and what may be the beginning of a stop text
        # New tokens are decoded behind those before them: so a word keeps the space in front of it,
        # which the tokenizer may drop at the beginning of a text.
        self.previous = sequence.tokens[:-1]
        self.previous_text = tokenizer.decode(self.previous)
        self.pending: list[int] = []

    def update(self) -> None:
        """Add the newest token of the sequence."""
        sequence = self.sequence
        if sequence.finish_reason != "eos":
            self.pending.append(sequence.tokens[-1])
        tokens = self.previous + self.pending
        text = self.tokenizer.decode(tokens)
        new_text = text[len(self.previous_text) :]
        # What the next token may change waits for it: a character whose bytes are not complete, and
        # with byte fallback a run of bytes, all of which become U+FFFD if one does not fit.
        is_stable = sequence.tokens[-1] not in self.tokenizer.unstable_tokens
        if sequence.finish_reason is not None or (is_stable and not new_text.endswith("\ufffd")):
            self.decoded += new_text
            # A blank may be dropped at the beginning: more than that must be in front.
            pending_text = self.tokenizer.decode(self.pending)
            if pending_text.strip():
                tokens = self.pending
                text = pending_text
            self.previous = tokens
            self.previous_text = text
            self.pending = []

        # Pass on all but a stop text, and what may become one.
        end = len(self.decoded)
        starts = [self.decoded.find(stop) for stop in self.stop_texts if stop in self.decoded]
        if starts:
            sequence.finish_reason = "stop"
            end = min(starts)
        elif sequence.finish_reason is None:
            longest = max(map(len, self.stop_texts), default=1)
            end = max(0, end - longest + 1)
        self.unprinted += self.decoded[len(self.text) : end]
        self.text = self.decoded[:end]


def print_texts(texts: Iterator[StreamingText], *, has_headings: bool) -> int:
    """Print texts in the order in which they begin, each as it grows.

    `texts` yields a text each time it has a new token. A heading has the text's number and prompt.
    Returns the number of tokens.
    """
    num_texts = 0
    num_tokens = 0
    unfinished = deque()  # texts that have begun; all but the first wait
    for text in texts:
        num_tokens += 1
        if text.sequence.num_generated == 1:
            num_texts += 1
            if has_headings:
                prompt = " ".join(text.sequence.prompt.split())[:HEADING_WIDTH]
                text.unprinted = f"--- {num_texts}: {prompt}\n{text.unprinted}"
            unfinished.append(text)

        # Print the first text, and, where it is finished, what those behind it have so far.
        while unfinished:
            current = unfinished[0]
            is_finished = current.sequence.finish_reason is not None
            print(current.unprinted, end="\n" if is_finished else "", flush=True)
            current.unprinted = ""
            if not is_finished:
                break
            unfinished.popleft()
    return num_tokens
