"""The probabilities that a model gives to texts, cut into rows of tokens."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from data.loader import document_ids
from model.layers import fp32
from model.transformer import Transformer
from run.progress import waiting

Row = tuple[list[int], int]  # tokens, and the index of the first that is scored
# Of a row: the summed log-probability of its scored tokens, and whether all are the most likely.
Score = tuple[float, bool]


def windows(tokens: list[int], context: int) -> list[Row]:
    """Cuts tokens into rows; every token but the first is scored once."""
    starts = range(0, len(tokens) - 1, context)
    return [(tokens[start : start + context + 1], 1) for start in starts]


@torch.inference_mode()
def score_rows(
    model: Transformer, rows: list[Row], batch_size: int, bos: int | None = None
) -> list[Score]:
    """Scores rows in batches, the longest first, so that rows of a batch have similar lengths.

    Where `bos` is a token id, it begins a document, and no token attends to another document.
    """
    device = model.embed.weight.device
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    scores = {}
    with waiting(f"scoring {len(rows)} windows of text", len(rows)) as bar:
        for start in range(0, len(rows), batch_size):
            # Pad on the right, which earlier tokens do not attend to. The last token is only a
            # target.
            indices = order[start : start + batch_size]
            rows_of_tokens = [torch.tensor(rows[index][0][:-1]) for index in indices]
            inputs = pad_sequence(rows_of_tokens, batch_first=True).to(device)
            documents = None
            if bos is not None:
                documents = document_ids(inputs, bos)
            hidden, _ = model.hidden(inputs, documents=documents)
            for index, states in zip(indices, hidden, strict=True):
                # The hidden state at a token predicts the next one.
                tokens, first = rows[index]
                logits = fp32(model.logits(states[first - 1 : len(tokens) - 1]))  # (targets, V)
                targets = torch.tensor(tokens, device=device)[first:]  # none of an empty answer
                nats = cross_entropy(logits, targets, reduction="none")
                is_greedy = (logits.argmax(dim=-1) == targets).all()
                scores[index] = (-nats.double().sum().item(), is_greedy.item())
                bar.update()
    return [scores[index] for index in range(len(rows))]
