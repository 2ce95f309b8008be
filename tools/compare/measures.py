"""Measure decoding speed, and the loss at longer contexts, with the checkpoints of runs."""

from run import checkpoint
from run.errors import IntegrityError, without_fix
from run.progress import print0
from tools.compare.runs import RECORDS, Run
from tools.evaluate import measure_lengths
from tools.latency import MIN_CONTEXT, latencies


def measure_checkpoints(runs: list[Run]) -> None:
    """Add missing measurements to judged runs that have a checkpoint.

    Decoding is measured only for the first run of each variant of a task. The results for runs in
    the folder of a comparison are added to its records.
    """
    judged = [run for run in runs if run.factor is None and run.lines and is_intact(run)]
    firsts = {}
    for run in judged:
        if run.settings["context"] >= MIN_CONTEXT:
            firsts.setdefault((run.task, run.name), run)
    # All models take turns, so all are measured again if one is new.
    changed = {}
    if not all(run.decoding for run in firsts.values()):
        measured = latencies({key: run.folder for key, run in firsts.items()})
        for key, milliseconds in measured.items():
            firsts[key].decoding = milliseconds
            changed[firsts[key].folder] = firsts[key]

    for run in judged:
        if run.task == "text" and not run.lengths:
            try:
                run.lengths = measure_lengths(run.folder)
                changed[run.folder] = run
            except (ValueError, IntegrityError) as error:
                print0(f"{run.folder.name}: {without_fix(error)}")
    for run in changed.values():
        if (run.folder.parent / RECORDS).exists():
            run.append_to_records()


def is_intact(run: Run) -> bool:
    """Whether a run has an intact checkpoint; print a line if all its checkpoints are damaged."""
    try:
        return checkpoint.newest_checkpoint(run.folder) is not None
    except IntegrityError as error:
        print0(f"{run.folder.name}: {without_fix(error)}")
        return False
