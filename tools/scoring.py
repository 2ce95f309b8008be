"""The loss of a model on texts cut into rows of tokens."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from data.loader import document_ids
from data.tokenizer import Tokenizer
from inference.load import load
from model.layers import fp32
from model.transformer import Transformer
from run import hardware
from run.progress import say


def load_to_score(
    path: Path | str | None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    precision: str = "auto",
) -> tuple[Transformer, Tokenizer, str, torch.dtype]:
    """Load a model for scoring text; return the results of `load` and the dtype of products.

    With dtype=auto, the weights are in fp32, and a GPU multiplies in the `precision` of training,
    so a checkpoint has the loss that its run logged, apart from rounding: on a GPU, training uses
    TF32 for the products that stay in fp32. Other values have the same effect as in generation.
    """
    weights = "fp32" if dtype == "auto" else dtype
    model, tokenizer, name = load(path, device, weights, context)
    device = model.embed.weight.device
    products = torch.float32
    if dtype == "auto" and device.type == "cuda":
        products = hardware.pick_precision(precision, device)
    return model, tokenizer, name, products


class Row(NamedTuple):
    tokens: list[int]
    first: int  # the index of the first token that is scored


def windows(tokens: list[int], context: int) -> list[Row]:
    """Cut tokens into rows of up to `context` inputs; every token but the first is scored once.

    If the last row would be shorter, it begins earlier, so that its scored tokens have more
    context. This is the rolling log-likelihood of lm-evaluation-harness (get_rolling_token_windows
    in lm_eval/utils.py).
    """
    rows = []
    for start in range(0, len(tokens) - 1, context):
        last = min(start + context, len(tokens) - 1)  # the last token that is scored
        begin = max(0, last - context)
        rows.append(Row(tokens[begin : last + 1], first=start + 1 - begin))
    return rows


@torch.inference_mode()
def total_nats(
    model: Transformer,
    rows: list[Row],
    batch_size: int,
    bos: int | None = None,
    *,
    precision: torch.dtype = torch.float32,
) -> float:
    """Return the sum of the losses of all scored tokens, computed in batches of `batch_size` rows.

    Matrices are multiplied in `precision`, or in the dtype of the weights if `precision` is fp32.
    If `bos` is given, this token begins a document, and no token attends to another document.
    """
    device = model.embed.weight.device
    total = 0.0
    # Rows of a batch have similar lengths. The padding is on the right, so no token of a row
    # attends to it.
    rows = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    say(f"scoring {len(rows)} windows")
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        inputs = [torch.tensor(row.tokens[:-1]) for row in batch]
        inputs = pad_sequence(inputs, batch_first=True).to(device)
        documents = None
        if bos is not None:
            documents = document_ids(inputs, bos)
        with hardware.autocast(device, precision):
            hidden, _ = model.hidden_states(inputs, documents=documents)
        for row, states in zip(batch, hidden, strict=True):
            # No token precedes the first token, so it cannot be predicted.
            assert 1 <= row.first < len(row.tokens)
            # The hidden state at a token predicts the next one.
            states = states[row.first - 1 : len(row.tokens) - 1]
            with hardware.autocast(device, precision):
                logits = model.logits(states)  # (targets, V)
            logits = fp32(logits)
            targets = torch.tensor(row.tokens[row.first :], device=device)
            nats = cross_entropy(logits, targets, reduction="none")
            total += nats.cpu().double().sum().item()  # Apple GPUs have no float64
    return total
