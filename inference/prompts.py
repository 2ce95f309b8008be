"""Prompts in: text to the sequences of tokens that continue it."""

import sys
from collections.abc import Iterable, Iterator

from data.files import decode_utf8
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
                tokens,
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
    tokens = tokenizer.encode_prompt("")
    turn = 0
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        with user_input():
            line = decode_utf8(sys.stdin.buffer.readline(), "the line")
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
        sequence = Sequence(
            tokens,
            max_new_tokens,
            seed=sample_seed(seed, turn),
            eos=tokenizer.eos_ids,
            num_cached=num_cached,
        )
        yield [sequence]

        tokens = sequence.tokens
        if tokens[-1] in tokenizer.eos_ids:  # the next line begins a document
            tokens = [*tokens, *tokenizer.encode_prompt("")]
        turn += 1


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of a prompt's sample from that of the command."""
    return (seed * 1_000_003 + sample) % 2**63


def truncate_left(tokens: list[int], context: int) -> list[int]:
    """Return the tokens, or the last `context` - 1 of them, with a warning, if they do not fit.

    BOS is then cut off too, and one place is left for the first new token.
    """
    if len(tokens) <= context:
        return tokens
    print(
        f"warning: a text of {len(tokens)} tokens, the model's context is {context}: "
        "its end is used",
        file=sys.stderr,
    )
    return tokens[1 - context :]
