"""Continue text with a trained model:  python generate.py "Once upon a time, there was"

Standard output carries new text and nothing else; speed, and what goes wrong, are told on standard error.
"""

from time import perf_counter

from common.cli import Parser, bounded_number
from inference.load import load

STARTED = perf_counter()

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from data.files import utf8_lines

BUCKET = (
    256  # a cache has room for a multiple of so many tokens, so that what is compiled serves again
)
WORTH_COMPILING = 4000  # steps that take as long as compiling


def arguments() -> argparse.Namespace:
    hint = "a prompt is quoted, and one with a dash comes after --"
    about, how = __doc__.partition("\n")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = Parser("python generate.py", description=about, epilog=hint, formatter_class=how)
    add = parser.add_argument
    add("prompt", nargs="?", help="text to continue; - reads it from standard input")
    add(
        "--prompt-file",
        type=Path,
        help='one prompt a line; in a .jsonl {"prompt": ...}, and so is what comes out',
    )
    add(
        "--interactive",
        action="store_true",
        help="a prompt a line, each goes on from the text before; Ctrl-D ends",
    )
    add(
        "--run",
        type=Path,
        help="a run, a Hugging Face folder or llama2.c's .bin (default: the run that saved last)",
    )
    add("--max-new-tokens", type=bounded_number(int, 1), default=200, help="of each continuation")
    add(
        "--temperature",
        type=bounded_number(float, 0),
        default=0.8,
        help="0: always the likeliest token",
    )
    add(
        "--top-k",
        type=bounded_number(int, 0),
        default=50,
        help="choose among so many; 0: among all",
    )
    add(
        "--top-p",
        type=bounded_number(float, 1e-9, 1),
        default=0.95,
        help="among the likeliest, this probable together",
    )
    add(
        "--min-p",
        type=bounded_number(float, 0, 1),
        default=0.0,
        help="among those this probable, the likeliest being 1",
    )
    add("--repetition-penalty", type=bounded_number(float, 1e-9), default=1.0, help="1: none")
    add(
        "--num-samples", type=bounded_number(int, 1), default=1, help="continuations of each prompt"
    )
    add(
        "--batch-size",
        type=bounded_number(int, 1),
        default=8,
        help="continued at a time; who ends makes room for the next",
    )
    add(
        "--seed",
        type=bounded_number(int, 0),
        default=0,
        help="of a prompt's continuations, in whatever file it stands",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help="end before this text; may be given several times",
    )
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16", "int8"),
        default="auto",
        help="auto: bf16 on a GPU, else fp32",
    )
    add(
        "--cache-dtype",
        choices=("auto", "fp32", "bf16", "int8"),
        default="auto",
        help="auto: of the weights; bf16 if int8",
    )
    add(
        "--compile",
        choices=("auto", "true", "false"),
        default="auto",
        help="auto: for thousands of tokens",
    )
    add(
        "--prompt-lookup",
        type=bounded_number(int, 0),
        default=0,
        help="guess so many tokens, in fewer steps",
    )
    add("--no-cache", action="store_true", help="read everything again for every token, slower")
    add(
        "--attention-map",
        type=Path,
        help="draw what each token of the prompt attends to, and end: a .png or .svg",
    )
    given = parser.parse_args()
    if (given.prompt is not None) + (given.prompt_file is not None) + given.interactive != 1:
        parser.error("exactly one of a prompt, --prompt-file and --interactive is needed")
    if given.attention_map is not None and given.prompt is None:
        parser.error("--attention-map draws one prompt")
    if given.interactive and given.num_samples > 1:
        parser.error("--interactive goes on with one text")
    of_cache = (
        given.interactive
        or given.prompt_lookup
        or given.cache_dtype != "auto"
        or given.compile == "true"
    )
    if given.no_cache and of_cache:
        parser.error(
            "--no-cache leaves nothing to --interactive, --prompt-lookup, --cache-dtype and --compile"
        )
    if "" in given.stop:
        parser.error("--stop needs text")
    return given


def main(given: argparse.Namespace) -> None:
    import torch

    from common import compilation, errors, hardware
    from inference.engine import compile_decode_step, decode_step, generate
    from inference.sampling import sample
    from inference.text import StreamingText, print_stream, read_turns, truncate_left

    with errors.user_input():
        prompts = [] if given.interactive else read_prompts(given)
        device = hardware.pick_device(given.device)
        steps = given.max_new_tokens * -(-len(prompts) // given.batch_size)
        wanted = {"true": True, "false": False}.get(given.compile, "auto")
        compiles, _ = compilation.pick_compile(wanted, device, steps >= WORTH_COMPILING)
        model, tokenizer, name = load(given, device)
        read = [
            truncate_left([tokenizer.bos, *tokenizer.encode(prompt)], model.context)
            for prompt in prompts
        ]
    if given.attention_map is not None:
        from inference import attention_map

        with errors.user_input():
            attention_map.draw(
                model, read[0], tokenizer.processor.id_to_piece(read[0]), given.attention_map
            )
        print(f"drawn: {given.attention_map}", file=sys.stderr)
        return
    cache = None
    if not given.no_cache:
        room = model.context if given.interactive else max(map(len, read)) + given.max_new_tokens
        capacity, rows = (
            min(model.context, -(-room // BUCKET) * BUCKET),
            min(given.batch_size, len(read) or 1),
        )
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
        cache = model.new_cache(
            rows, capacity, dtypes.get(given.cache_dtype, model.embed.weight.dtype), device
        )
    choices = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    draw = partial(sample, **{choice: getattr(given, choice) for choice in choices})
    step = decode_step
    if compiles and cache is not None:
        step = compile_decode_step(device)
        if not compile_ahead(step, model, cache, given.prompt_lookup, required=wanted is True):
            step = decode_step
    text = partial(
        StreamingText, tokenizer, given.max_new_tokens, given.seed, given.stop, is_json(given)
    )
    samples = (number % given.num_samples for number in range(len(read)))
    texts = map(text, range(len(read)), samples, read, prompts)
    if given.interactive:
        texts = read_turns(text, tokenizer, model.context, cache)

    loaded = perf_counter()
    made, first = print_stream(
        generate(model, texts, draw, cache=cache, step=step, guesses=given.prompt_lookup)
    )
    ended, told = perf_counter(), f"{name}: {made} tokens; loaded in {loaded - STARTED:.2f} s"
    if made > 0:
        told += f", first token {first - loaded:.3f} s later"
    if made > 1 and not given.interactive:
        told += f", then {(made - 1) / (ended - first):,.0f} tokens/s"
    print(
        f"{told}, {'no cache' if cache is None else f'{cache.nbytes:,} bytes of cache'}",
        file=sys.stderr,
    )


def compile_ahead(step: Callable, model, cache, num_draft_tokens: int, *, required: bool) -> bool:
    """Compile the decode step for the shapes that it will get, and leave the cache empty.

    Returns whether that worked. Where it did not and is `required`, the process ends with exit code 2.
    """
    import torch

    from common import compilation, errors

    told = "compiling the decode step, about half a minute where .cache/ does not have it"
    print(f"{told} (to begin at once: --compile false)", file=sys.stderr)
    compilation.use_cache()
    rows = len(cache.lengths)
    shapes = {1, 1 + num_draft_tokens}
    try:
        with compilation.exit_without_waiting(), errors.report_errors(), torch.inference_mode():
            for width in sorted(shapes):
                tokens = torch.zeros(rows, width, dtype=torch.int64, device=cache.lengths.device)
                step(model, tokens, cache, None if width == 1 else torch.ones_like(tokens).bool())
    except RuntimeError as error:
        if not compilation.is_compile_error(error):
            raise
        problem = f"compilation failed ({compilation.first_error_line(error)})"
        if required:
            errors.exit_with(
                errors.INPUT, f"{problem}. fix: --compile false, or another C++ compiler in $CXX"
            )
        print(f"warning: {problem}: decoding goes on without it", file=sys.stderr)
        return False
    finally:
        cache.reset()
    return True


def read_prompts(given: argparse.Namespace) -> list[str]:
    """Each as often as there are samples. Raises ValueError for a file without a line and for JSON without a prompt."""
    from inference.text import decode_utf8

    if given.prompt_file is None:
        raw = sys.stdin.buffer.read() if given.prompt == "-" else os.fsencode(given.prompt)
        return [decode_utf8(raw)] * given.num_samples
    lines = [
        (n, line.rstrip("\r\n"))
        for n, line in enumerate(utf8_lines(given.prompt_file), 1)
        if line.strip()
    ]
    if not lines:
        raise ValueError(f"no prompts ({given.prompt_file} is empty). fix: one prompt a line")
    prompts = [
        prompt_of(line, f"{given.prompt_file} line {n}") if is_json(given) else line
        for n, line in lines
    ]
    return [prompt for prompt in prompts for _ in range(given.num_samples)]


def is_json(given: argparse.Namespace) -> bool:
    return given.prompt_file is not None and given.prompt_file.suffix.lower() == ".jsonl"


def prompt_of(line: str, where: str) -> str:
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        prompt = json.loads(line)["prompt"]
        prompt.encode()  # half of a surrogate pair is no text
        return prompt
    raise ValueError(f'no prompt ({where}: {line[:60]}). fix: {{"prompt": "text"}}')


if __name__ == "__main__":
    asked = arguments()
    from common.errors import report_errors

    with report_errors():
        main(asked)
