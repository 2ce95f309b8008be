"""Which attention should I use?

    python -m tools.compare attention=gqa,mha,mla seed=0,1,2 model=small max_minutes=10

Overrides are those of train.py, with Hydra's sweeps. Each combination is trained by a process of
its own, on a machine with several GPUs one on each; the first is the baseline. The same call again
skips what is finished, goes on where it was cut off, and shares the work with one still running.
It ends with a report, which  python -m tools.compare --report RUN...  writes of any runs.
"""

import argparse
import shlex
import sys
from itertools import chain
from pathlib import Path

from run import config, errors
from run.cli import Parser
from run.errors import IntegrityError
from tools.compare.forecast import forecast
from tools.compare.jobs import Job, train_all
from tools.compare.plan import SIZES, digest, match_baseline, plan_jobs
from tools.compare.report import write_report
from tools.compare.runs import Run


def main(args: argparse.Namespace) -> None:
    if args.report:
        # A pattern such as runs/* also matches logs, which are left out.
        run_dirs = [path for path in args.report if path.is_dir() or not path.exists()]
        folder = args.dir or Path("runs", f"report-{digest(['--report', *map(str, run_dirs)])}")
        baseline = None
        problems = {}
    else:
        # Train what is missing. A run that fails is listed in the report.
        with errors.user_input():
            tasks = plan_jobs(args.overrides, args.match, args.dir)
        jobs = list(chain.from_iterable(tasks.values()))
        folder = jobs[0].run_dir.parent
        baseline = jobs[0].settings["name"]

        # Say what it will take, before anything trains.
        print(f"{len(jobs)} runs in {folder}/", file=sys.stderr)
        for task, task_jobs in tasks.items():
            print(forecast(task, task_jobs), file=sys.stderr)
        for task, task_jobs in tasks.items():
            train(task, task_jobs)
        run_dirs = [job.run_dir for job in jobs if job.problem is None]
        problems = {job.run_dir.name: job.problem for job in jobs if job.problem is not None}

    runs = read_finished(run_dirs, problems)
    command = f"python -m tools.compare {shlex.join(sys.argv[1:])}"
    with errors.user_input():
        print(write_report(folder, runs, problems, baseline, command))


def train(task: str, jobs: list[Job]) -> None:
    """Trains all jobs of a task, the first one first: the others are compiled if it was.

    A common max_minutes limits the first; the others get as many tokens.
    """
    lengths = {(job.settings["steps"], job.settings["max_minutes"]) for job in jobs}
    baseline = jobs[0]
    has_limit = len(lengths) == 1 and baseline.settings["max_minutes"] is not None
    train_all([baseline])
    if baseline.problem is None:
        match_baseline(baseline, jobs[1:], same_tokens=has_limit)
    elif has_limit:
        errors.exit_with(errors.INPUT, f"the baseline did not finish: {baseline.problem}")
    if len(jobs) > 1:
        print(forecast(task, jobs), file=sys.stderr)  # now by the time that the baseline took
        train_all(jobs[1:])


def read_finished(run_dirs: list[Path], problems: dict[str, str]) -> list[Run]:
    """Reads the runs that finished, and adds why others did not to `problems`."""
    runs = []
    for run_dir in run_dirs:
        try:
            run = Run.read(run_dir)
            if run.done:
                runs.append(run)
            else:
                problems[run_dir.name] = f"at {run.last['tokens']:,} tokens"
        except IntegrityError as error:
            problems[run_dir.name] = str(error)
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.compare",
        description=__doc__,
        epilog="overrides are written without dashes: attention=gqa,mha",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE,...", help="for train.py; commas sweep")
    add(
        "--match",
        choices=(*SIZES, "none"),
        default="params",
        help="what model.hidden makes equal (default: params)",
    )
    add("--dir", type=Path, help="where runs and report go (default: runs/compare-...)")
    add(
        "--report",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="only report; the variant of the first run is the baseline",
    )
    args = parser.parse_intermixed_args()
    if bool(args.overrides) == bool(args.report):
        parser.error("either overrides to train with, or --report RUN...")
    return args


if __name__ == "__main__":
    args = parse_arguments()
    with config.report_errors():
        main(args)
