"""Which attention should I use? Train them side by side, and read the report.

    python -m tools.compare attention=gqa,mha,mla seed=0,1,2 model=small max_minutes=10
    python -m tools.compare attention=gqa,gdn tasks=text,recall recall.seed=0,1 recall.steps=900
    python -m tools.compare --report runs/NAME-*

Overrides are those of train.py; KEY=A,B trains with each value, and the first is the baseline. Each
combination is a process of its own, on a machine with several GPUs one on each. max_minutes (5, of
train.py) is the time of the first run; all others train on as many tokens as that.
  tasks=text,recall,copy  what to train on, each by itself (default: text)
  TASK.KEY=VALUE          an override for that task alone
The same call again skips what is finished, goes on where it was cut off, and shares the work with
one that is still running. It ends with a report, which --report writes of any runs.
"""

import argparse
import shlex
import sys
from pathlib import Path

from run import errors
from run.cli import Parser
from run.errors import IntegrityError
from tools.compare.jobs import train_all
from tools.compare.plan import SIZES, plan_jobs
from tools.compare.report import write_report
from tools.compare.runs import Run


def main(args: argparse.Namespace) -> None:
    # Why runs are not in the report, by the name of their folder.
    problems = {}
    if args.report:
        # A pattern such as runs/* also matches logs, which are left out.
        run_dirs = [path for path in args.report if path.is_dir() or not path.exists()]
        folder = args.dir or Path("runs/report")
    else:
        with errors.user_input():
            jobs = plan_jobs(args.overrides, args.match, args.dir)
        folder = jobs[0].run_dir.parent
        print(f"{len(jobs)} runs in {folder}/", file=sys.stderr)
        train_all(jobs)
        # The first variant is the baseline, also where its first run failed.
        baseline = jobs[0].variant
        jobs.sort(key=lambda job: job.variant != baseline)
        run_dirs = [job.run_dir for job in jobs if not job.has_failed]
        problems = {job.run_dir.name: job.outcome for job in jobs if job.has_failed}

    # Read what finished.
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
    command = f"python -m tools.compare {shlex.join(sys.argv[1:])}"
    with errors.user_input():
        print(write_report(folder, runs, problems, command, args.quick))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.compare",
        __doc__,
        "overrides are written without dashes: attention=gqa,mha",
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE,...", help="for train.py; commas sweep")
    add("--match", choices=(*SIZES, "none"), default="params", help="what model.hidden makes equal")
    add(
        "--dir", type=Path, help="where runs and report go (default: runs/compare-..., runs/report)"
    )
    add(
        "--report",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="only report; the variant of the first run is the baseline",
    )
    add("--quick", action="store_true", help="report without longer contexts and decoding speed")
    args = parser.parse_intermixed_args()
    if bool(args.overrides) == bool(args.report):
        parser.error("either overrides to train with, or --report RUN...")
    return args


if __name__ == "__main__":
    args = parse_arguments()
    with errors.report_errors():
        main(args)
