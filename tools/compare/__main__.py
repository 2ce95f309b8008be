"""Which attention should I use?  python -m tools.compare attention=gqa,mha,mla seed=0,1,2 model=small max_minutes=10

The words are those of train.py, with Hydra's sweeps. Each combination is trained by a process of its own, on a machine
with several GPUs one on each; the first is the baseline. The same call again skips what is finished, goes on where it
was cut off, and shares the work with one that is still running. It ends with a report, which
python -m tools.compare --report RUN...  writes of any runs.
"""

import argparse
import shlex
import sys
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from common import errors
from common.cli import Parser
from common.errors import IntegrityError
from tools.compare.jobs import train_all
from tools.compare.plan import SIZES, digest, match_baseline_tokens, plan_jobs
from tools.compare.report import write_report
from tools.compare.runs import Run


def main(given: argparse.Namespace) -> None:
    with errors.user_input():
        jobs = [*plan_jobs(given.words, given.match, given.dir)] if given.words else []
    if jobs:
        print(f"{len(jobs)} runs in {jobs[0].run.parent}/", file=sys.stderr)
        lengths = {(job.settings["steps"], job.settings["max_minutes"]) for job in jobs}
        train_all(
            match_baseline_tokens(jobs)
            if len(lengths) == 1 and jobs[0].settings["max_minutes"]
            else jobs
        )
    runs, problems = [], {job.run.name: job.problem for job in jobs if job.problem}
    folders = [
        run for run in given.report if run.is_dir() or not run.exists()
    ]  # not the files that a * finds too
    for run in folders or [job.run for job in jobs if job.problem is None]:
        try:
            runs.append(Run.read(run))
        except IntegrityError as error:
            problems[run.name] = str(error)
    words = ["--report", *map(str, folders)] if folders else ["--match", given.match, *given.words]
    words += ["--dir", str(given.dir)] if given.dir else []
    where = given.dir or (jobs[0].run.parent if jobs else Path("runs", f"report-{digest(words)}"))
    call, baseline = (
        f"python -m tools.compare {shlex.join(words)}",
        jobs[0].settings["name"] if jobs else None,
    )
    with errors.user_input():
        print(write_report(where, runs, problems, baseline, call))


def arguments() -> argparse.Namespace:
    hint = "words are written without dashes: attention=gqa,mha"
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        "python -m tools.compare", description=__doc__, epilog=hint, formatter_class=form
    )
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE,...", help="of train.py; commas sweep"
    )
    match = "what model.hidden makes equal (default: params)"
    parser.add_argument("--match", choices=SIZES, default="params", help=match)
    parser.add_argument(
        "--dir", type=Path, help="where runs and report go (default: runs/compare-...)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="only report; the first is the baseline's",
    )
    given = parser.parse_intermixed_args()
    if bool(given.words) == bool(given.report):
        parser.error("words to train with, or --report RUN...")
    return given


if __name__ == "__main__":
    asked = arguments()
    with errors.report_errors(HydraException, OmegaConfBaseException):
        main(asked)
