"""The rows of a batch: token sequences, and the state from which each row samples."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from run import hardware

# Takes logits (B, V), seeds (B,), draw indices (B,) and seen tokens (B, V); returns tokens (B,).
Sampler = Callable[..., Tensor]


@dataclass(eq=False)
class Sequence:
    """The tokens of a prompt and of its continuation.

    `tokens` starts with the prompt, and loses its older half when it outgrows the context; `seen`
    has every token of the whole prompt and continuation. `seed` determines the samples. `prompt` is
    the prompt's text, and `index` numbers the sequences of a call from 0; both are for output.
    `finish_reason` is None while tokens are generated, then "eos", "stop" or "length".
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
        """Stop generating: the engine gives the row to another sequence."""
        self.finish_reason = reason


@dataclass
class SamplerState:
    """The newest token of each row, and the inputs of the next draw besides the logits.

    Each draw updates it in place.
    """

    tokens: Tensor  # (B, 1), the newest of each row: the input of the next decode step
    seeds: Tensor  # (B,)
    draw_indices: Tensor  # (B,), the index of the next draw
    seen_tokens: Tensor  # (B, V), true for tokens in the whole prompt or drawn since

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> "SamplerState":
        """Allocate the state of rows without a sequence."""
        return cls(
            tokens=torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draw_indices=torch.zeros(num_rows, dtype=torch.int64, device=device),
            seen_tokens=torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.seeds, self.draw_indices, self.seen_tokens]

    def rows(self, rows: slice) -> "SamplerState":
        """A view of some rows, which shares their memory."""
        return SamplerState(
            tokens=self.tokens[rows],
            seeds=self.seeds[rows],
            draw_indices=self.draw_indices[rows],
            seen_tokens=self.seen_tokens[rows],
        )

    def start(self, row: int, sequence: Sequence) -> None:
        """Set up a row to draw the next token of a sequence."""
        (seen,) = hardware.to_device(self.tokens.device, torch.tensor(list(sequence.seen)))
        self.seeds[row].fill_(sequence.seed)
        self.draw_indices[row].fill_(sequence.num_generated)
        self.seen_tokens[row].zero_().index_fill_(0, seen, True)

    def draw(self, sampler: Sampler, logits: Tensor) -> None:
        """Draw the next token of each row from logits (B, V)."""
        assert logits.shape == self.seen_tokens.shape
        drawn = sampler(logits, self.seeds, self.draw_indices, self.seen_tokens)  # (B,)
        # Another shape would be broadcast to the rows, and another dtype would be rounded.
        assert drawn.shape == self.seeds.shape and drawn.dtype == torch.int64
        self.tokens.copy_(drawn[:, None])
        self.draw_indices.add_(1)
        self.seen_tokens.scatter_(1, self.tokens, True)
