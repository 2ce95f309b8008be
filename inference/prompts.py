"""Prompts in: text to the sequences of tokens that continue it."""

import sys
from collections.abc import Iterable

from data.tokenizer import Tokenizer
from inference.batch import Sequence


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
