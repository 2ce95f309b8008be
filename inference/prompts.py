"""Tokenize prompts into the sequences that the engine continues."""

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
    """Build `num_samples` sequences from each prompt.

    If a prompt is longer than the context, only its end is kept, with a warning.
    """
    sequences = []
    for prompt in prompts:
        # A prompt as long as the context is kept whole; the engine drops its older half after the
        # first new token. A longer prompt loses its beginning, including BOS, to leave room for one
        # new token.
        tokens = tokenizer.encode_prompt(prompt)
        num_cut = 0
        if len(tokens) > context:
            lengths = f"{len(tokens)} tokens, the model's context is {context}"
            print(f"warning: only the end of the prompt is used ({lengths})", file=sys.stderr)
            num_cut = len(tokens) - (context - 1)
        for sample in range(num_samples):
            sequence = Sequence(
                [*tokens],
                max_new_tokens,
                seed=(seed * 1_000_003 + sample) % 2**63,
                eos=tokenizer.eos_ids,
                prompt=prompt,
                index=len(sequences),
            )
            # Truncate only now, because the repetition penalty applies to the whole prompt.
            del sequence.tokens[:num_cut]
            sequences.append(sequence)
    return sequences
