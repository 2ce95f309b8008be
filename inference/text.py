"""Generate text from prompts, and return it at the end, yield it token by token, or print it."""

from collections.abc import Iterable, Iterator
from functools import partial

from data.tokenizer import IdTokenizer, Tokenizer
from inference.batch import Sequence
from inference.engine import Engine, new_cache
from inference.prompts import new_sequences
from inference.sampling import sample
from model.transformer import Transformer
from run.progress import print0

HEADING_WIDTH = 70  # characters of the prompt that a heading shows


def generate_text(
    model: Transformer, tokenizer: Tokenizer, prompts: str | list[str], **options
) -> list[str]:
    """Continue one prompt or several; return the generated texts, each up to a stop text.

    `options` are passed to `stream_text`.
    """
    num_texts = 1 if isinstance(prompts, str) else len(prompts)
    texts = [""] * num_texts
    for text in stream_text(model, tokenizer, prompts, **options):
        texts[text.sequence.index] = text.text
    return texts


def stream_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: str | list[str],
    *,
    max_new_tokens: int = 200,
    stop_texts: str | Iterable[str] = (),
    seed: int = 0,
    batch_size: int = 8,
    **options: float,
) -> Iterator["StreamingText"]:
    """Continue prompts token by token; yield a prompt's continuation whenever it has a new token.

    The caller may stop after any token. `options` are passed to `sampling.sample`: temperature,
    top_k, top_p and so on.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    sequences = new_sequences(
        tokenizer, prompts, model.context, max_new_tokens=max_new_tokens, seed=seed
    )
    cache = new_cache(model, sequences, batch_size)
    sampler = partial(sample, vocab_size=tokenizer.vocab_size, **options)
    engine = Engine(model, sampler, cache)
    stop_texts = check_stop_texts(tokenizer, stop_texts)
    yield from detokenize(engine.generate(sequences), tokenizer, stop_texts)


def detokenize(
    generated: Iterator[Sequence], tokenizer: Tokenizer, stop_texts: tuple[str, ...]
) -> Iterator["StreamingText"]:
    """Yield a sequence's text whenever it has a new token; finish the sequence at a stop text."""
    texts = {}
    for sequence in generated:
        if sequence not in texts:
            texts[sequence] = StreamingText(sequence, tokenizer, stop_texts)
        texts[sequence].update()
        yield texts[sequence]


def check_stop_texts(tokenizer: Tokenizer, stop_texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return a tuple of the stop texts.

    Raises ValueError for one that is empty or not valid Unicode, and for any if the run has no
    tokenizer.
    """
    if isinstance(stop_texts, str):
        stop_texts = [stop_texts]
    stop_texts = tuple(stop_texts)
    for stop in stop_texts:
        stop.encode()  # raises ValueError for lone surrogates
        if not stop or isinstance(tokenizer, IdTokenizer):
            raise ValueError(
                f"a stop text must not be empty, and needs a run with a tokenizer ({stop!r}). "
                "fix: leave it out"
            )
        # A special token decodes to nothing, but ordinary text may look like one. EOS always stops.
        tokens = [token for token in range(tokenizer.vocab_size) if tokenizer.piece(token) in stop]
        special = {token for token in tokens if tokenizer.decode([token]) == ""}
        if special - {*tokenizer.eos_ids}:
            print0(f"warning: {stop!r} stops only at ordinary text, never at a special token")
        if "\\n" in stop:
            print0(
                f"warning: {stop!r} contains a backslash, not a newline, which is $'\\n' in bash"
            )
    return stop_texts


class StreamingText:
    """A sequence's generated text, up to the first stop text.

    `text` only grows. Create the object at the sequence's first new token, and call `update` after
    every new token.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, stop_texts: tuple[str, ...]):
        assert sequence.num_generated == 1
        self.sequence = sequence
        self.tokenizer = tokenizer
        self.stop_texts = stop_texts
        self.text = ""
        self.num_printed = 0  # characters of `text` that `take_new` has returned
        self.decoded = ""  # `text`, followed by characters that may begin a stop text
        # New tokens are decoded together with the previous ones, so that a word keeps the space
        # before it, which the tokenizer may drop at the beginning of a text.
        self.previous = sequence.tokens[:-1]
        self.previous_text = tokenizer.decode(self.previous)
        self.pending: list[int] = []

    def update(self) -> None:
        """Add the sequence's newest token, and finish the sequence at a stop text."""
        self.decode_newest()

        # Pass on the text before a stop text; hold back the last characters, which may begin one.
        end = len(self.decoded)
        starts = [self.decoded.find(stop) for stop in self.stop_texts if stop in self.decoded]
        if starts:
            self.sequence.finish("stop")
            end = min(starts)
        elif self.sequence.finish_reason is None:
            longest = max(map(len, self.stop_texts), default=1)
            end = max(0, end - (longest - 1))
        self.text = self.decoded[:end]

    def decode_newest(self) -> None:
        """Append to `decoded` the text that later tokens can no longer change."""
        is_finished = self.sequence.finish_reason is not None
        newest = self.sequence.tokens[-1]
        if self.sequence.finish_reason != "eos":
            self.pending.append(newest)
        tokens = self.previous + self.pending
        text = self.tokenizer.decode(tokens)
        new_text = text[len(self.previous_text) :]
        # Hold back text that the next token may change: an incomplete UTF-8 character and, with
        # byte fallback, a run of bytes, all of which become U+FFFD if one of them is invalid.
        is_stable = newest not in self.tokenizer.unstable_tokens
        is_whole = is_stable and not new_text.endswith("\ufffd")
        if not is_whole and not is_finished:
            return

        self.decoded += new_text
        # The space at the beginning may be dropped, so the previous text must not be only spaces.
        pending_text = self.tokenizer.decode(self.pending)
        if pending_text.strip():
            tokens = self.pending
            text = pending_text
        self.previous = tokens
        self.previous_text = text
        self.pending = []

    def take_new(self) -> str:
        """Return the text added to `text` since the last call."""
        new_text = self.text[self.num_printed :]
        self.num_printed = len(self.text)
        return new_text


def print_texts(texts: Iterator[StreamingText], *, has_headings: bool) -> int:
    """Print one text as it grows; print several in their order, each as a whole.

    `texts` yields a text whenever it has a new token. With `has_headings`, there are several texts,
    and a heading shows the number and prompt of each. Returns the number of generated tokens.
    """
    num_tokens = 0
    complete = {}  # texts by their index
    num_printed = 0
    for text in texts:
        num_tokens += 1
        is_complete = text.sequence.finish_reason is not None
        if not has_headings:
            print(text.take_new(), end="\n" if is_complete else "", flush=True)
        elif is_complete:
            complete[text.sequence.index] = text
        while num_printed in complete:
            text = complete.pop(num_printed)
            print(f"{heading(text.sequence)}\n{text.text}", flush=True)
            num_printed += 1
    return num_tokens


def heading(sequence: Sequence) -> str:
    """Return the line above a text: its number and the beginning of its prompt."""
    prompt = " ".join(sequence.prompt.split())[:HEADING_WIDTH]
    return f"--- {sequence.index + 1}: {prompt}"
