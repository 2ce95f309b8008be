"""Prompts in: text to the sequences of tokens that continue it."""

import sys
from collections.abc import Iterable, Iterator

from data.tokenizer import Tokenizer
from inference.batch import Sequence
from model.cache import Cache
from run.errors import user_input


def new_sequences(
    tokenizer: Tokenizer,
    prompts: Iterable[str],
    context: int,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    seed: int = 0,
) -> list[Sequence]:
    """Build `num_samples` sequences of each prompt, which is truncated to the model's context."""
    sequences = []
    for prompt in prompts:
        tokens = truncate_left(tokenizer.encode_prompt(prompt), context)
        for sample in range(num_samples):
            sequence = Sequence(
                [*tokens],
                max_new_tokens,
                seed=sample_seed(seed, sample),
                eos=tokenizer.eos_ids,
                prompt=prompt,
            )
            sequences.append(sequence)
    return sequences


def read_turns(
    tokenizer: Tokenizer, context: int, cache: Cache, max_new_tokens: int, seed: int
) -> Iterator[list[Sequence]]:
    """Yield a sequence for each line of standard input, which continues the text before it.

    It must be finished when the next one is asked for. What the cache holds of the text before is
    not prefilled again.
    """
    beginning = tokenizer.encode_prompt("")
    tokens = beginning
    turn = 0
    while (line := read_line()) != "":
        new_tokens = tokenizer.encode(line.rstrip("\r\n"))
        if not new_tokens:
            continue

        # The cache holds the tokens of the text before, unless their beginning has to go.
        num_cached = int(cache.lengths[0])
        tokens = tokens + new_tokens
        if len(tokens) > context:
            tokens = truncate_left(tokens, context)
            num_cached = 0
        sequence = Sequence(
            tokens,
            max_new_tokens,
            seed=sample_seed(seed, turn),
            eos=tokenizer.eos_ids,
            num_cached=num_cached,
        )
        yield [sequence]
        tokens = sequence.tokens
        if sequence.finish_reason == "eos":  # the next line begins a document
            tokens = tokens + beginning
        turn += 1


def read_line() -> str:
    """Read a line of standard input, behind "> " on a terminal. It is empty at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    with user_input():
        return sys.stdin.buffer.readline().decode()


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of a prompt's sample from that of the command."""
    return (seed * 1_000_003 + sample) % 2**63


def truncate_left(tokens: list[int], context: int) -> list[int]:
    """Return the tokens, or the last `context` - 1 of them, with a warning, if they do not fit.

    BOS is then cut off too, and one place is left for the first new token.
    """
    if len(tokens) <= context:
        return tokens
    problem = f"a text of {len(tokens)} tokens, the model's context is {context}"
    print(f"warning: {problem}: its end is used", file=sys.stderr)
    return tokens[1 - context :]
