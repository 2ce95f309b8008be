"""Continue text with a trained model:  python generate.py "Once upon a time, there was"

Standard output carries new text and nothing else; speed and problems go to standard error. On a
terminal, and where there are several texts, a line with its prompt is above each.
"""

from time import perf_counter

STARTED = perf_counter()

import argparse
import json
import math
import os
import sys
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from data.files import decode_utf8, utf8_lines
from run import errors
from run.cli import Parser, add_model_options, bounded_number

MIN_STEPS_TO_COMPILE = 4000  # decode steps that take as long as compiling


def main(args: argparse.Namespace) -> None:
    # torch is imported only now, so that --help and wrong options are answered at once.
    import torch

    from inference.batch import new_sampler_state
    from inference.engine import decode_step, generate, new_cache
    from inference.load import load
    from inference.prompts import new_sequences, read_turns
    from inference.sampling import sample
    from inference.text import print_texts, stream_texts
    from run import compilation, hardware

    # Read and check all input; a ValueError ends the process with exit code 2.
    with errors.user_input():
        prompts = read_prompts(args)
        device = hardware.pick_device(args.device)
        num_batches = math.ceil(len(prompts) * args.num_samples / args.batch_size)
        is_long = args.max_new_tokens * num_batches >= MIN_STEPS_TO_COMPILE
        wanted = {"true": True, "false": False}.get(args.compile, "auto")
        is_compiled, _ = compilation.pick_compile(wanted, device, is_long)
        model, tokenizer, name = load(args.run, device, args.dtype)
        sequences = new_sequences(
            tokenizer,
            prompts,
            model.context,
            max_new_tokens=args.max_new_tokens,
            num_samples=args.num_samples,
            seed=args.seed,
        )
    if args.attention_map is not None:
        from tools import attention_map

        tokens = sequences[0].tokens
        labels = tokenizer.id_to_piece(tokens)
        with errors.user_input():
            attention_map.draw(model, tokens, labels, args.attention_map)
        print(f"drawn: {args.attention_map}", file=sys.stderr)
        return

    # Set up decoding.
    sampler = partial(
        sample,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    cache = None
    state = None
    step = decode_step
    if not args.no_cache:
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
        cache = new_cache(model, sequences, args.batch_size, dtypes.get(args.cache_dtype))
        state = new_sampler_state(model, len(cache.lengths))
        if is_compiled:
            step = compile_ahead(args, model, cache, sampler, state)

    # Generate and print: all sequences, or a turn of the conversation at a time.
    loaded = perf_counter()
    rounds = [sequences]
    if args.interactive:
        rounds = read_turns(tokenizer, model.context, cache, args.max_new_tokens, args.seed)
    generated = chain.from_iterable(
        generate(
            model,
            batch,
            sampler,
            cache=cache,
            state=state,
            step=step,
            num_draft_tokens=args.prompt_lookup,
        )
        for batch in rounds
    )
    texts = stream_texts(generated, tokenizer, args.stop)
    has_headings = len(sequences) > 1 or (sys.stdout.isatty() and not args.interactive)
    num_tokens, first_token = print_texts(texts, is_json=is_json(args), has_headings=has_headings)
    ended = perf_counter()

    # Report speed and memory.
    report = f"{name}: {num_tokens} tokens; loaded in {loaded - STARTED:.2f} s"
    if num_tokens > 0:
        report += f", first token {first_token - loaded:.3f} s later"
    if num_tokens > 1 and not args.interactive:
        speed = (num_tokens - 1) / (ended - first_token)
        report += f", then {speed:,.0f} tokens/s"
    memory = "no cache" if cache is None else f"{cache.nbytes:,} bytes of cache"
    print(f"{report}, {memory}", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python generate.py",
        description=__doc__.partition("\n")[0],
        epilog="quote the prompt, and put -- in front of one that begins with a dash",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    positive = bounded_number(int, 1)
    natural = bounded_number(int, 0)

    # What to continue, and with which model.
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "prompt", nargs="?", help="text to continue; - reads it from standard input"
    )
    prompts.add_argument(
        "--prompt-file",
        type=Path,
        help='one prompt a line; a .jsonl has {"prompt": ...}, and JSON lines come out',
    )
    prompts.add_argument(
        "--interactive",
        action="store_true",
        help="a prompt a line, each continues the text before it; Ctrl-D ends",
    )
    add_model_options(parser)

    # How to sample.
    add("--max-new-tokens", type=positive, default=200, help="of each continuation")
    add(
        "--temperature",
        type=bounded_number(float, 0),
        default=0.8,
        help="0: always the likeliest token",
    )
    add("--top-k", type=natural, default=50, help="sample from so many tokens; 0: from all")
    add(
        "--top-p",
        type=bounded_number(float, 1e-9, 1),
        default=0.95,
        help="sample from the likeliest tokens that together have this probability",
    )
    add(
        "--min-p",
        type=bounded_number(float, 0, 1),
        default=0.0,
        help="sample from tokens of at least this probability, relative to the likeliest",
    )
    add("--repetition-penalty", type=bounded_number(float, 1e-9), default=1.0, help="1: none")
    add("--num-samples", type=positive, default=1, help="continuations of each prompt")
    add(
        "--seed",
        type=natural,
        default=0,
        help="random seed; a prompt's continuations do not depend on the other prompts",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help="end before this text; may be given several times",
    )

    # How to compute.
    add(
        "--cache-dtype",
        choices=("auto", "fp32", "bf16", "int8"),
        default="auto",
        help="auto: that of the weights; bf16 if they are int8",
    )
    add(
        "--compile",
        choices=("auto", "true", "false"),
        default="auto",
        help="auto: for thousands of tokens",
    )
    add(
        "--prompt-lookup",
        type=natural,
        default=0,
        help="draft so many tokens from earlier text, and verify them in one step",
    )
    add("--no-cache", action="store_true", help="compute all tokens anew at each step, slower")
    add(
        "--attention-map",
        type=Path,
        help="draw what each token of the prompt attends to, a .png or .svg, and end without text",
    )

    # Refuse what does not go together.
    args = parser.parse_args()
    if args.attention_map is not None and args.prompt is None:
        parser.error("--attention-map draws one prompt")
    if args.interactive and args.num_samples > 1:
        parser.error("--interactive continues one text")
    sets_cache = args.cache_dtype != "auto" or args.compile == "true"
    if args.no_cache and (args.interactive or args.prompt_lookup or sets_cache):
        options = "--interactive, --prompt-lookup, --cache-dtype and --compile"
        parser.error(f"--no-cache does not go with {options}")
    if "" in args.stop:
        parser.error("--stop needs text")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Read the prompts; none with --interactive.

    Raises ValueError for what is not UTF-8, a file without a line and JSON without a prompt.
    """
    if args.interactive:
        return []
    if args.prompt == "-":
        return [decode_utf8(sys.stdin.buffer.read(), "standard input")]
    if args.prompt is not None:
        return [decode_utf8(os.fsencode(args.prompt), "the prompt")]

    # A prompt file has a prompt a line; empty lines are skipped.
    prompts = []
    for number, line in enumerate(utf8_lines(args.prompt_file), start=1):
        if line.strip():
            prompt = line.rstrip("\r\n")
            if is_json(args):
                prompt = parse_json_prompt(prompt, f"{args.prompt_file} line {number}")
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"no prompts ({args.prompt_file} is empty). fix: one prompt a line")
    return prompts


def is_json(args: argparse.Namespace) -> bool:
    return args.prompt_file is not None and args.prompt_file.suffix.lower() == ".jsonl"


def parse_json_prompt(line: str, location: str) -> str:
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        prompt = json.loads(line)["prompt"]
        prompt.encode()  # half of a surrogate pair is no text
        return prompt
    raise ValueError(f'no prompt ({location}: {line[:60]}). fix: {{"prompt": "text"}}')


def compile_ahead(args: argparse.Namespace, model, cache, sampler, state):
    """Compile the decode step for all of its shapes, and return it.

    Where compilation fails, returns the plain step; with --compile true the process ends.
    """
    from inference.engine import compile_decode_step, decode_step, warm_up
    from run import compilation

    note = "compiling the decode step, about half a minute where .cache/ does not have it"
    print(f"{note} (to begin at once: --compile false)", file=sys.stderr)
    compilation.use_cache()
    step = compile_decode_step(cache.lengths.device)
    try:
        with compilation.exit_without_waiting(), errors.report_errors():
            warm_up(step, model, cache, sampler, state, args.prompt_lookup)
    except RuntimeError as error:
        if not compilation.is_compile_error(error):
            raise
        problem = compilation.first_error_line(error)
        if args.compile == "true":
            compilation.exit_failed(problem, "--compile false")
        warning = f"compilation failed ({problem}): decoding goes on without it"
        print(f"warning: {warning}", file=sys.stderr)
        step = decode_step
    cache.reset()
    return step


if __name__ == "__main__":
    args = parse_arguments()
    with errors.report_errors():
        main(args)
