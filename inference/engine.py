"""Continuing texts: rows of one batch that live independently, each step and each draw on the device."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from model.cache import Cache
from model.transformer import Transformer

Step = Callable[[Transformer, Tensor, Cache, Tensor | None], Tensor]
Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Sequence:
    """Tokens that are continued by `most` more, or until somebody sets `done`; `key` seeds what is drawn.

    A text longer than the context loses its older half. `held` of its tokens are in its row of the cache already.
    """

    def __init__(self, tokens: list[int], most: int, key: int = 0, held: int = 0):
        self.tokens, self.most, self.key, self.held = list(tokens), most, key, held
        self.drawn, self.done = 0, most == 0

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.drawn += 1
        self.done = self.drawn == self.most


def decode_step(
    model: Transformer, tokens: Tensor, cache: Cache, valid: Tensor | None = None
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V). Compiled once, it serves every length up to the capacity."""
    return model(tokens, cache, valid)


def compile_decode_step(device: torch.device) -> Step:
    """`decode_step` compiled, for one model and one cache: at the first call with so many tokens, and never again."""
    step = torch.compile(
        decode_step,
        dynamic=False,
        fullgraph=True,
        mode="reduce-overhead" if device.type == "cuda" else None,
    )
    met = set()

    def quick(model: Transformer, tokens: Tensor, cache: Cache, valid: Tensor | None) -> Tensor:
        if not met:  # a CUDA graph writes to where these are
            cache.map(lambda tensor: torch._dynamo.mark_static_address(tensor) or tensor)
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance(skip_guard_eval_unsafe=tokens.shape in met):
            met.add(tokens.shape)
            return step(model, tokens, cache, valid)

    return quick


def prefill(model: Transformer, rows: list[list[int]], cache: Cache | None, chunk: int) -> Tensor:
    """Read what is new of each row, `chunk` tokens at a time -> the logits (B, V) after each."""
    width, device = max(map(len, rows)), model.embed.weight.device
    padded = torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)
    ragged, end = (
        any(len(row) < width for row in rows),
        0 if cache is None else int(cache.lengths.max()),
    )
    for tokens in padded.split(width if cache is None else chunk, dim=1):
        end += tokens.shape[1]
        part = None if cache is None else cache.first(end)
        hidden = model.hidden(tokens.clamp(min=0), part, tokens >= 0 if ragged else None)
    return model.logits(
        hidden[:, -1]
    )  # padded on the left, so that the last column is everyone's last token


@torch.inference_mode()
def generate(
    model: Transformer,
    texts: Iterable[Sequence],
    draw: Draw,
    *,
    cache: Cache | None = None,
    step: Step = decode_step,
    chunk: int = 2048,
    guesses: int = 0,
) -> Iterator[Sequence]:
    """Yields each text with a token more, as they are drawn.

    `cache` has a row for each of the texts that are continued together, and room for min(context, all tokens of the
    longest); a row that is done takes the next text, and equal texts that begin together are read once. Without a
    cache, everything is read again for every token, to the same text. With `guesses`, what followed the last tokens
    earlier in a text is read along with them, and kept as far as it is what is drawn: the same text in fewer steps
    (prompt lookup, github.com/apoorvumang/prompt-lookup-decoding).
    Raises ValueError for an empty text or one longer than the context.
    """
    rows = Batch(model, texts, cache, chunk)
    while rows.fill():
        tokens = draw(rows.logits, rows.keys, rows.places, rows.seen)
        rows.note(tokens)
        if cache is not None and guesses > 0:
            yield from rows.push(tokens.tolist())
            yield from speculate(rows, tokens, draw, step, guesses)
            continue
        values = copy_to_host_async(tokens)
        if cache is not None and rows.go_on():
            rows.logits = step(model, tokens[:, None], cache, None)[:, -1]
        yield from rows.push(values())


def speculate(
    rows: "Batch", tokens: Tensor, draw: Draw, step: Step, guesses: int
) -> Iterator[Sequence]:
    """Reads `tokens` (B,) and what may follow them -> each text with a token more, for each guess that was right.

    What is drawn depends on key, place and logits alone, so a guess is right if it is what would have been drawn.
    """
    model, cache, device = rows.model, rows.cache, tokens.device
    guessed = [draft_tokens(text, guesses, model.context) for text in rows.texts]
    if not any(guessed):
        rows.logits = step(model, tokens[:, None], cache, None)[:, -1]
        return
    padded = torch.tensor([g + [0] * (guesses - len(g)) for g in guessed], device=device)
    read = torch.cat((tokens[:, None], padded), dim=1)  # (B, 1 + guesses)
    place, sizes = (
        torch.arange(1 + guesses, device=device),
        torch.tensor([[len(g)] for g in guessed], device=device),
    )
    before = [(layer, layer.map(torch.clone)) for layer in cache.layers if not layer.can_rewind]
    lengths = cache.lengths.clone()
    logits = step(model, read, cache, place <= sizes)

    right = torch.zeros_like(tokens)  # how many guesses of each row
    for number in range(guesses):
        drawn = draw(logits[:, number], rows.keys, rows.places, rows.seen)
        agrees = (
            (drawn == padded[:, number]) & (right == number) & (number < sizes[:, 0]) & rows.live()
        )
        if not agrees.any():
            break
        rows.note(drawn, agrees)
        right += agrees
        yield from rows.push(
            [d if a else None for d, a in zip(drawn.tolist(), agrees.tolist(), strict=True)]
        )
    rows.logits = logits[torch.arange(len(right), device=device), right]

    if not before:
        cache.rewind(lengths + 1 + right)
    elif (
        right[:, None] < sizes
    ).any():  # what cannot be rewound is restored, and what was right is read again
        for layer, kept in before:
            layer.copy_(kept)
        cache.lengths.copy_(lengths)
        step(model, read, cache, place <= right[:, None])


def draft_tokens(text: "Sequence | None", most: int, context: int) -> list[int]:
    """What came after the newest earlier place in the text that has its last three, or two, tokens."""
    if text is None or text.done or len(text.tokens) > context:
        return []
    tokens = text.tokens
    most = min(most, text.most - text.drawn, context - len(tokens))
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == last[0] and tokens[start : start + size] == last:
                return tokens[start + size : start + size + most]
    return []


class Batch:
    """Which text is in which row, and the tensors that the next draw needs: logits (B, V) and seen (B, V), keys and
    places (B,).
    """

    def __init__(
        self, model: Transformer, texts: Iterable[Sequence], cache: Cache | None, chunk: int
    ):
        self.model, self.cache, self.chunk = model, cache, chunk
        self.waiting = iter(texts)
        size, weight = 1 if cache is None else len(cache.lengths), model.embed.weight
        self.texts: list[Sequence | None] = [None] * size
        self.logits = torch.zeros(size, len(weight), dtype=weight.dtype, device=weight.device)
        self.seen = torch.zeros_like(self.logits, dtype=torch.bool)
        self.keys, self.places = torch.zeros(2, size, dtype=torch.int64, device=weight.device)

    def fill(self) -> bool:
        """Gives rows that are done the next texts, and reads anew what has outgrown the context -> is there work?"""
        due = []
        for row, text in enumerate(self.texts):
            if text is None or text.done:
                text = self.texts[row] = next(
                    (text for text in self.waiting if not text.done), None
                )
            elif self.cache is not None and len(text.tokens) <= self.model.context:
                continue
            if text is None:
                continue
            if not 0 < len(text.tokens) <= self.model.context + text.drawn:
                given = f"got {len(text.tokens)}"
                raise ValueError(
                    f"a prompt must have 1 to {self.model.context} tokens ({given}). fix: cut it"
                )
            if len(text.tokens) > self.model.context:
                del text.tokens[: self.model.context // 2]
            due.append((row, text))
        self.read(due)
        for row, text in due:
            text.held, self.seen[row] = 0, False
            self.seen[row, text.tokens] = True
            self.keys[row], self.places[row] = text.key, text.drawn
        return any(self.texts)

    def read(self, due: list[tuple[int, Sequence]]) -> None:
        """All rows at once where that wastes little; else one after the other, and equal ones once."""
        new = [text.tokens[text.held :] for _, text in due]
        apart = len(set(map(tuple, new))) == len(self.texts) and not any(
            text.held for _, text in due
        )
        if (
            self.cache is not None
            and apart
            and len(new) * max(map(len, new)) <= 2 * sum(map(len, new))
        ):
            self.cache.reset()
            self.logits = prefill(self.model, new, self.cache, self.chunk)
            return
        for number, (row, text) in enumerate(due):
            cache = None if self.cache is None else self.cache.row(row)
            if (
                cache is not None
                and number > 0
                and new[number] == new[number - 1]
                and text.held == 0
            ):
                cache.copy_(self.cache.row(due[number - 1][0]))
                self.logits[row] = self.logits[due[number - 1][0]]
                continue
            if cache is not None and text.held == 0:
                cache.reset()
            self.logits[row] = prefill(self.model, [new[number]], cache, self.chunk)[0]

    def live(self) -> Tensor:
        return torch.tensor(
            [text is not None and not text.done for text in self.texts], device=self.logits.device
        )

    def go_on(self) -> bool:
        """Whether any text wants a token after the one that was drawn last."""
        return any(text is not None and text.drawn + 1 < text.most for text in self.texts)

    def note(self, tokens: Tensor, rows: Tensor | None = None) -> None:
        """These (B,) were drawn; `rows` (B,) says where, if not everywhere."""
        added = torch.ones_like(tokens, dtype=torch.bool) if rows is None else rows
        self.places += added
        self.seen.scatter_(
            1, tokens[:, None], self.seen.gather(1, tokens[:, None]) | added[:, None]
        )

    def push(self, tokens: list[int | None]) -> Iterator[Sequence]:
        for text, token in zip(self.texts, tokens, strict=True):
            if text is not None and not text.done and token is not None:
                text.push(token)
                yield text


def copy_to_host_async(tokens: Tensor) -> Callable[[], list[int]]:
    """A way to their values that does not wait for what a GPU is given to do after them."""
    if not tokens.is_cuda:
        return tokens.tolist
    values, ready = tokens.to("cpu", non_blocking=True), torch.cuda.Event()
    ready.record()

    def wait() -> list[int]:
        ready.synchronize()
        return values.tolist()

    return wait
