"""The rows of a batch: their token sequences, and the state from which each row is sampled."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from run import hardware

# Takes logits (B, V), seeds (B,), draw indices (B,) and seen tokens (B, V); returns tokens (B,).
Sampler = Callable[..., Tensor]


@dataclass(eq=False)
class Sequence:
    """The tokens of a prompt and its continuation.

    `tokens` starts with the prompt, and loses its older half when it outgrows the context; `seen`
    keeps every token of the full prompt and continuation. `seed` seeds the sampling. `prompt` is
    the prompt's text, and `index` counts the results of `new_sequences` from 0; both are used only
    for output. `finish_reason` is None while tokens are generated, then "eos", "stop" or "length".
    """

    tokens: list[int]
    max_new_tokens: int
    _: KW_ONLY
    seed: int = 0
    eos: Collection[int] = ()
    prompt: str = ""
    index: int = 0
    num_generated: int = 0
    finish_reason: str | None = None
    seen: set[int] = field(init=False)

    def __post_init__(self):
        self.seen = set(self.tokens)

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - self.num_generated

    def append(self, token: int) -> None:
        """Add a generated token, and finish at EOS or at the maximum length."""
        self.tokens.append(token)
        self.seen.add(token)
        self.num_generated += 1
        if token in self.eos:
            self.finish("eos")
        elif self.num_left == 0:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Stop generating; the engine then frees the row for the next sequence."""
        self.finish_reason = reason


@dataclass
class SamplerState:
    """Each row's newest token, and the sampler's inputs other than the logits.

    Sampling updates the state in place.
    """

    tokens: Tensor  # (B, 1), newest token of each row, which the next decode step reads
    seeds: Tensor  # (B,)
    draw_indices: Tensor  # (B,), the index of the next draw
    seen_tokens: Tensor  # (B, V), true for tokens in the full prompt or sampled since

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> "SamplerState":
        """Allocate the state for rows that do not have a sequence yet."""
        return cls(
            tokens=torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draw_indices=torch.zeros(num_rows, dtype=torch.int64, device=device),
            seen_tokens=torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.seeds, self.draw_indices, self.seen_tokens]

    def rows(self, rows: slice) -> "SamplerState":
        """Return a view of some rows, which shares their memory."""
        return SamplerState(
            tokens=self.tokens[rows],
            seeds=self.seeds[rows],
            draw_indices=self.draw_indices[rows],
            seen_tokens=self.seen_tokens[rows],
        )

    def start(self, row: int, sequence: Sequence) -> None:
        """Set up a row to sample a sequence's next token."""
        (seen,) = hardware.to_device(self.tokens.device, torch.tensor(list(sequence.seen)))
        self.seeds[row].fill_(sequence.seed)
        self.draw_indices[row].fill_(sequence.num_generated)
        self.seen_tokens[row].zero_().index_fill_(0, seen, True)

    def draw(self, sampler: Sampler, logits: Tensor) -> None:
        """Sample the next token of each row from logits (B, V)."""
        assert logits.shape == self.seen_tokens.shape
        drawn = sampler(logits, self.seeds, self.draw_indices, self.seen_tokens)  # (B,)
        # Another shape would be broadcast to the rows, and another dtype would be converted.
        assert drawn.shape == self.seeds.shape and drawn.dtype == torch.int64
        self.tokens.copy_(drawn[:, None])
        self.draw_indices.add_(1)
        self.seen_tokens.scatter_(1, self.tokens, True)
