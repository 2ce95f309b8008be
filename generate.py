"""Continue text with a trained model:  python generate.py "Once upon a time, there was"

The generated text is printed to standard output; speed and warnings go to standard error. If
several texts are generated, each follows a line with its number and the beginning of its prompt.
"""

import argparse
import os
import sys
from functools import partial
from time import perf_counter

import torch

from data.tokenizer import Tokenizer
from inference.batch import Sequence
from inference.engine import Engine, new_cache
from inference.load import load
from inference.prompts import new_sequences
from inference.sampling import sample
from inference.text import check_stop_texts, detokenize, print_texts
from model.transformer import Transformer
from run import compilation, errors, hardware
from run.cli import (
    Parser,
    add_batch_option,
    add_model_options,
    bounded_number,
    end_with_reader,
    user_path,
)
from run.progress import print0

MIN_STEPS_TO_COMPILE = 4000  # decode steps that take about as long as compilation


def main(args: argparse.Namespace) -> None:
    """Read prompts, load a model, generate, and print."""
    # Read and validate all input; a ValueError exits with code 2.
    with errors.exit_on_invalid_input():
        prompts = read_prompts(args)
        is_compiled = pick_compile(args, len(prompts))
        model, tokenizer, name = load(args.run, args.device, args.dtype)
        stop_texts = check_stop_texts(tokenizer, args.stop)
        sequences = new_sequences(
            tokenizer,
            prompts,
            model.context,
            max_new_tokens=args.max_new_tokens,
            num_samples=args.num_samples,
            seed=args.seed,
        )

    # Set up decoding.
    engine = new_engine(args, model, tokenizer, sequences)
    if is_compiled and engine.cache is not None:
        compile_engine(engine, is_required=args.compile == "true")
    if engine.can_capture:
        engine.capture()

    # Generate lazily, while printing. On a terminal, a single text follows its dimmed prompt.
    if sys.stderr.isatty() and len(sequences) == 1:
        end = "" if sys.stdout.isatty() else "\n"
        print(f"\033[2m{prompts[0]}\033[0m", end=end, file=sys.stderr, flush=True)
    start = perf_counter()
    texts = detokenize(engine.generate(sequences), tokenizer, stop_texts)
    num_tokens = print_texts(texts, has_headings=len(sequences) > 1)

    # Report speed and memory.
    speed = num_tokens / (perf_counter() - start)
    memory = "no cache"
    if engine.cache is not None:
        memory = f"{engine.cache.nbytes:,} bytes of cache"
    tokens = f"{num_tokens} token{'s' * (num_tokens != 1)}"
    print0(f"{name}: {tokens}, {speed:,.0f} tokens/s, {memory}")


def pick_compile(args: argparse.Namespace, num_prompts: int) -> bool:
    """Whether to compile the decode step.

    Raises ValueError if torch cannot use the device or, with --compile true, cannot compile for it.
    """
    device = hardware.pick_device(args.device)
    num_texts = num_prompts * args.num_samples
    num_steps = args.max_new_tokens * num_texts / min(args.batch_size, num_texts)
    is_long = num_steps >= MIN_STEPS_TO_COMPILE
    wanted = {"auto": "auto", "true": True, "false": False}[args.compile]
    return compilation.pick_compile(wanted, device, is_long)


def new_engine(
    args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, sequences: list[Sequence]
) -> Engine:
    """Create an engine that samples according to the options, with a cache unless --no-cache."""
    sampler = partial(
        sample,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    cache = None
    if not args.no_cache:
        cache_dtype = torch.int8 if args.cache_dtype == "int8" else None
        cache = new_cache(model, sequences, args.batch_size, cache_dtype)
    return Engine(model, sampler, cache)


def compile_engine(engine: Engine, *, is_required: bool) -> None:
    """Compile the decode step. If that fails, exit if `is_required`; otherwise it stays eager."""
    compilation.prepare_to_compile()
    option = "--compile false"
    compilation.compile_and_run(engine.compile, "the decoding step", is_required, option)


def parse_arguments() -> argparse.Namespace:
    end_with_reader()
    parser = Parser("python generate.py", __doc__)
    add = parser.add_argument
    positive = bounded_number(int, 1)
    natural = bounded_number(int, 0)
    fraction = bounded_number(float, 0, 1)

    # Prompts and model.
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "prompt",
        nargs="?",
        help="text to continue; - reads it from stdin and drops a final newline; put -- before a "
        "text that begins with a dash",
    )
    prompts.add_argument("--prompt-file", type=user_path, help="file with one prompt per line")
    add_model_options(parser)
    add_batch_option(parser)

    # Sampling.
    add(
        "--max-new-tokens",
        "--max-tokens",
        type=positive,
        default=200,
        help="maximum number of tokens to generate per sample",
    )
    add(
        "--temperature",
        "--temp",
        type=bounded_number(float, 0),
        default=0.8,
        help="divide logits by this number before sampling; 0: greedy decoding",
    )
    add(
        "--top-k",
        type=natural,
        default=50,
        help="sample from the k most likely tokens; 0: all tokens",
    )
    add(
        "--top-p",
        type=fraction,
        default=0.95,
        help="sample from the smallest set of tokens with at least this total probability",
    )
    add(
        "--min-p",
        type=fraction,
        default=0.0,
        help="drop tokens whose probability is below this fraction of the highest probability",
    )
    add(
        "--repetition-penalty",
        type=bounded_number(float, 1e-9),
        default=1.0,
        help="above 1, tokens that are already in the prompt or the generated text become less "
        "likely; 1: no penalty",
    )
    add("--num-samples", type=positive, default=1, help="number of samples per prompt")
    add(
        "--seed",
        type=natural,
        default=0,
        help="random seed; a sample depends on the rest of its batch only through rounding",
    )
    add(
        "--stop",
        action="append",
        default=[],
        help="end generation before this string; may be repeated; a newline is $'\\n' in bash",
    )

    # Cache and compilation.
    add(
        "--cache-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="dtype of the KV cache; auto: the dtype of the weights, or with --dtype int8, of the "
        "embedding",
    )
    add(
        "--compile",
        choices=("auto", "true", "false"),
        default="auto",
        help="compile the decoding step; auto: only for long generations",
    )
    add("--no-cache", action="store_true", help="recompute all tokens at each step (slower)")

    args = parser.parse_args()
    if args.no_cache and args.compile == "true":
        parser.error("--no-cache cannot be combined with --compile true")
    if args.no_cache and args.cache_dtype != "auto":
        parser.error(f"--no-cache cannot be combined with --cache-dtype {args.cache_dtype}")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Read the prompts. Raises ValueError for text that is not UTF-8, or a file without prompts."""
    if args.prompt == "-":
        text = sys.stdin.buffer.read().decode("utf-8-sig")
        return [text.replace("\r\n", "\n").removesuffix("\n")]
    if args.prompt is not None:
        # Raises UnicodeDecodeError, a ValueError, for an argument that is not UTF-8.
        return [os.fsencode(args.prompt).decode("utf-8-sig")]

    # A prompt file has one prompt per line; blank lines are skipped.
    try:
        lines = args.prompt_file.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (--prompt-file {args.prompt_file}: {error.reason} in position "
            f"{error.start}). fix: convert it, for example with iconv -f ENCODING -t UTF-8"
        ) from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(
            f"no prompts in the file (--prompt-file {args.prompt_file}). fix: write one prompt "
            "per line"
        )
    return prompts


if __name__ == "__main__":
    with errors.hard_exit(), errors.report_errors():
        main(parse_arguments())
