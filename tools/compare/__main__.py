"""Train attention variants, and report whether one is better than the baseline.

    python -m tools.compare attention=gqa,mha,mla seed=0,1,2 model=small max_minutes=10
    python -m tools.compare attention=gqa,gdn data=recall steps=900 max_minutes=null
    python -m tools.compare attention=gqa,mla seed=0,1,2,3,4,5,6,7 model=small --tune
    python -m tools.compare --report runs/NAME-*

It takes the overrides of train.py except run_dir and resume. KEY=A,B trains with each value; the
baseline has the first one. Each run has its own process; with several GPUs, each GPU trains one run
at a time. On a CPU, runs take turns; with OMP_NUM_THREADS=1, each core trains one run at a time.
With max_minutes (default 5) or tokens_per_parameter, the first run of each model size sets the
number of tokens for the other runs of this size. --tune first searches for the best learning rate
of each variant. Running the same command again skips finished runs and resumes interrupted ones. A
run whose text or settings have changed is trained again. A report is written at the end, or by
--report for existing runs.
"""

import argparse
import sys
from pathlib import Path

from run import errors
from run.cli import Parser, user_path
from run.compose import compose
from run.errors import IntegrityError
from run.paths import run_path
from tools.compare.jobs import locked
from tools.compare.measures import measure_checkpoints
from tools.compare.plan import Variant, plan_variants, train_variants
from tools.compare.report import write_report
from tools.compare.runs import RECORDS, Run, read_records
from tools.compare.tuning import FACTORS


def main(args: argparse.Namespace) -> None:
    if args.report:
        folders = [run_path(folder) for folder in args.report]
        runs, problems = read_runs(folders)
        folder = args.dir or report_folder(folders)
    else:
        with errors.exit_on_invalid_input():
            variants = plan_variants(args.overrides, args.match, args.dir, args.tune)
        folder = variants[0].folder
        announce(variants, args.tune)
        with locked(folder):
            jobs = train_variants(variants, args.tune)
        problems = {job.run_dir.name: job.outcome for job in jobs if job.run is None}
        runs = [job.run for job in jobs if job.run is not None]
    for run in runs:
        if run.has_diverged and run.factor is None:
            problems[run.folder.name] = "diverged"
    if not args.quick:
        measure_checkpoints(runs)
    with errors.exit_on_invalid_input():
        print(write_report(folder, runs, problems, args.margin))


def report_folder(folders: list[Path]) -> Path:
    """Return the report's folder: the folder of a single comparison, or else runs/report."""
    if len(folders) == 1 and (folders[0] / RECORDS).exists():
        return folders[0]
    return Path("runs/report")


def announce(variants: list[Variant], has_search: bool) -> None:
    """Print the number of runs, and their duration if max_minutes limits it and steps does not."""
    count = sum(len(variant.seeds) for variant in variants)
    text = f"{count} run{'s' * (count != 1)} in {variants[0].folder}/"
    if has_search:
        searched = len(FACTORS) * len(variants)
        count += searched
        text += f", after at least {searched} runs of the learning-rate search"
    settings = compose(variants[0].overrides)
    if settings.steps is None and settings.max_minutes is not None:
        text += f"; about {count * settings.max_minutes / 60:.1f} hours on one device"
    print(text, file=sys.stderr)


def read_runs(folders: list[Path]) -> tuple[list[Run], dict[str, str]]:
    """Read finished runs from their folders, or from the records of comparisons.

    Also returns, by folder name, the reason why each of the other runs was left out.
    """
    runs = []
    problems = {}
    for folder in folders:
        if folder.is_file():  # a pattern such as runs/* also matches logs
            continue
        try:
            recorded = read_records(folder)
            runs += recorded.values()
            if recorded:
                continue
            # A comparison's record of a run contains more than the folder of the run.
            run = read_records(folder.parent).get(folder.name) or Run.read(folder)
            if run.done:
                runs.append(run)
            else:
                problems[folder.name] = f"unfinished, at {run.last['tokens']:,} tokens"
        except IntegrityError as error:
            problems[folder.name] = str(error)
    return runs, problems


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.compare", __doc__)
    add = parser.add_argument
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE,...",
        help="overrides of train.py; several values, separated by commas, are swept",
    )
    add(
        "--match",
        choices=("params", "flops", "none"),
        default="params",
        help="adjust model.hidden so that variants of a size have equal parameter or FLOP counts",
    )
    add(
        "--tune",
        action="store_true",
        help="first search for the best learning rate of each variant",
    )
    add(
        "--margin",
        type=float,
        default=0.01,
        help="a variant is as good as the baseline if the interval of its loss difference ends "
        "below this",
    )
    add(
        "--dir",
        type=user_path,
        help="output folder for the runs and the report (default: runs/compare-...; with --report, "
        "the folder of a single comparison, or else runs/report)",
    )
    add(
        "--report",
        type=user_path,
        nargs="+",
        metavar="RUN",
        help="report on these runs, or on the folders of comparisons, without training; the first "
        "run determines the baseline",
    )
    add(
        "--quick",
        action="store_true",
        help="do not measure the loss at longer contexts or the decoding speed",
    )
    args = parser.parse_intermixed_args()
    if bool(args.overrides) == bool(args.report):
        parser.error("pass either overrides to train with, or --report RUN...")
    return args


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
