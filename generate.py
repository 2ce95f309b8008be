"""Continue text with a trained model:  python generate.py "Once upon a time, there was"

Standard output carries new text and nothing else; speed, and what goes wrong, are told on standard error.
"""

from time import perf_counter

STARTED = perf_counter()

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from data.sources import utf8_lines
from data.tokenizer import Stream, Tokenizer


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("prompt", nargs="?", help="text to continue; - reads it from standard input")
    add("--prompt-file", type=Path, help="a file of one prompt a line, continued as one batch")
    add("--run", type=Path, help="a run folder (default: the one in runs/ that saved last)")
    add("--max-new-tokens", type=number(int, 0), default=200)
    add("--temperature", type=number(float, 0), default=0.8, help="0: always the likeliest token")
    add("--top-k", type=number(int, 0), default=50, help="choose among so many; 0: among all")
    add(
        "--top-p", type=number(float, 1e-9, 1), default=0.95, help="among the likeliest that are this probable together"
    )
    add("--min-p", type=number(float, 0, 1), default=0.0, help="among those this probable, the likeliest being 1")
    add("--repetition-penalty", type=number(float, 1e-9), default=1.0, help="1: none")
    add("--num-samples", type=number(int, 1), default=1, help="continuations of each prompt")
    add("--seed", type=number(int, 0), default=0)
    add("--stop", help="end before this text")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on a GPU that has it, else fp32")
    add("--cache-dtype", choices=("auto", "fp32", "bf16", "int8"), default="auto", help="auto: that of the weights")
    add("--compile", choices=("auto", "true", "false"), default="auto", help="the decode step; auto: false")
    add("--no-cache", action="store_true", help="read everything again for every token: the same text, slower")
    add("--attention-map", type=Path, help="draw what each token of the prompt attends to, and end: a .png or .svg")
    given = parser.parse_args()
    if (given.prompt is None) == (given.prompt_file is None):
        parser.error("one of a prompt and --prompt-file is needed")
    if given.attention_map is not None and given.prompt is None:
        parser.error("--attention-map draws one prompt, not a --prompt-file")
    return given


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}. fix: quote the prompt; python generate.py --help\n")


def number(kind: type, least: float, most: float = sys.maxsize) -> Callable[[str], float]:
    """For argparse: text that is a number from `least` to `most`."""

    def parse(text: str) -> float:
        if not least <= kind(text) <= most:
            most_too = f" to {most:g}" if most < sys.maxsize else ""
            raise argparse.ArgumentTypeError(f"must be from {least:g}{most_too}, got {text}")
        return kind(text)

    parse.__name__ = kind.__name__
    return parse


def main(given: argparse.Namespace) -> None:
    import torch

    from model.sampling import decode_step, generate, sample
    from training import errors, hardware

    with errors.input_problems():
        device = hardware.pick_device(given.device)
        compiles, _ = hardware.pick_compile({"true": True}.get(given.compile, False), device, is_long=False)
        prompts = read_prompts(given)
        model, tokenizer = load(given, device)
    tokens = [shortened([tokenizer.bos, *tokenizer.encode(prompt)], model.context) for prompt in prompts]
    if given.attention_map is not None:
        from tools import attention_map

        with errors.input_problems():
            attention_map.draw(model, tokens[0], tokenizer.pieces.id_to_piece(tokens[0]), given.attention_map)
        print(f"drawn: {given.attention_map}", file=sys.stderr)
        return
    cache = None
    if not given.no_cache:
        capacity = min(model.context, max(map(len, tokens)) + given.max_new_tokens)
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
        cache = model.new_cache(len(tokens), capacity, dtypes.get(given.cache_dtype, model.embed.weight.dtype), device)
    choices = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    generator = torch.Generator(device).manual_seed(given.seed)
    draw = partial(sample, generator=generator, **{name: getattr(given, name) for name in choices})
    step = torch.compile(decode_step, dynamic=False, fullgraph=True) if compiles else decode_step
    steps = generate(model, tokens, given.max_new_tokens, draw, copies=given.num_samples, cache=cache, step=step)

    pairs = [pair for pair in zip(prompts, tokens, strict=True) for _ in range(given.num_samples)]
    rows = [Row(prompt, Stream(tokenizer, read[-1:]), tokenizer.eos, given.stop) for prompt, read in pairs]
    loaded = perf_counter()
    made, first = write(rows, (drawn.tolist() for drawn in steps))
    ended, told = perf_counter(), f"{made} tokens; loaded in {loaded - STARTED:.2f} s"
    if made > 0:
        told += f", first token {first - loaded:.3f} s later"
    if made > len(rows):
        told += f", then {(made - len(rows)) / (ended - first):,.0f} tokens/s"
    held = "no cache" if cache is None else f"{cache.nbytes * given.num_samples:,} bytes of cache"
    print(f"{told}, {held}", file=sys.stderr)


def load(given: argparse.Namespace, device):
    """The model, in the precision asked for, and the tokenizer of a run's newest checkpoint."""
    import torch

    from training import checkpoint, errors, folder

    found = checkpoint.newest(given.run or folder.newest_run(Path("runs")))
    if found is None:
        raise ValueError(f"no checkpoint (--run {given.run}). fix: a run folder, with checkpoints/step-* in it")
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    bf16 = given.dtype == "bf16" or (given.dtype == "auto" and fast)
    model = checkpoint.load_model(found, device, torch.bfloat16 if bf16 else torch.float32)
    if not all(p.isfinite().all() for p in model.parameters()):
        errors.fail(errors.DIVERGED, f"weights contain NaN or infinity ({found}). fix: an older checkpoint")
    return model, Tokenizer.load(found / "tokenizer.model")


def read_prompts(given: argparse.Namespace) -> list[str]:
    """Raises ValueError for what is not UTF-8, and for a file without a line."""
    if given.prompt_file is not None:
        prompts = [line.rstrip("\r\n") for line in utf8_lines(given.prompt_file) if line.strip()]
        if not prompts:
            raise ValueError(f"no prompts ({given.prompt_file} is empty). fix: one prompt a line")
        return prompts
    raw = sys.stdin.buffer.read() if given.prompt == "-" else os.fsencode(given.prompt)
    try:
        return [raw.decode()]
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 (at byte {error.start}). fix: convert it") from None


def shortened(tokens: list[int], context: int) -> list[int]:
    if len(tokens) <= context:
        return tokens
    print(
        f"warning: a prompt of {len(tokens)} tokens, the model's context is {context}: its end is used", file=sys.stderr
    )
    return tokens[1 - context :]


class Row:
    """One continuation: tokens go in, text comes out once no token to come can change it."""

    def __init__(self, prompt: str, stream: Stream, eos: int, stop: str | None):
        self.prompt, self.stream, self.eos, self.stop = prompt, stream, eos, stop
        self.ready, self.held, self.done = "", "", False

    def push(self, token: int) -> None:
        if token == self.eos:
            self.end()
            return
        text = self.held + self.stream.push(token)
        if self.stop and self.stop in text:
            self.ready, self.held, self.done = self.ready + text.partition(self.stop)[0], "", True
            return
        may_stop = max((n for n in range(1, len(self.stop or "")) if text.endswith(self.stop[:n])), default=0)
        self.ready += text[: len(text) - may_stop]
        self.held = text[len(text) - may_stop :]

    def end(self) -> None:
        if not self.done:
            self.ready, self.held, self.done = self.ready + self.held + self.stream.text(), "", True


def write(rows: list[Row], steps: Iterator[list[int]]) -> tuple[int, float]:
    """Prints the rows in order, each as it grows -> how many tokens came, and when the first did."""
    made, first, current = 0, math.nan, 0
    for drawn in steps:
        for row, token in zip(rows, drawn, strict=True):
            if not row.done:
                row.push(token)
                made += 1
        first = perf_counter() if math.isnan(first) else first
        current = show(rows, current)
        if current == len(rows):
            return made, first
    for row in rows:
        row.end()
    show(rows, current)
    return made, first


def show(rows: list[Row], current: int) -> int:
    """Prints what is ready of row `current`, and of those after it when it is done -> the first that is not."""
    for number, row in enumerate(rows[current:], start=current):
        if row.prompt is not None and sys.stderr.isatty():
            print(f"\033[2m{row.prompt}\033[0m", end="", file=sys.stderr, flush=True)
        row.prompt = None  # echoed
        print(row.ready, end="\n" if row.done else "", flush=True)
        row.ready = ""
        if not row.done:
            return number
    return len(rows)


if __name__ == "__main__":
    asked = arguments()
    from training.errors import one_line

    with one_line():
        main(asked)
