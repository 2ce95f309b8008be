"""A trace of a few training steps, and the operators that take most of their time."""

import os
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from run.progress import print0
from training.clock import Clock

SKIPPED_STEPS = 3  # the first steps of a process, which compile and fill caches


def start_profiler(num_steps: int, run_dir: Path, device: torch.device, clock: Clock) -> profile:
    """Record `num_steps` steps, after SKIPPED_STEPS, to a run's trace.json.gz.

    Call the profiler's `step` after each step. Open the trace at https://ui.perfetto.dev.
    """

    def write(profiler: profile) -> None:
        with clock.pause():
            file = run_dir / "trace.json.gz"
            profiler.export_chrome_trace(str(file))
            kind = "cpu" if device.type == "cpu" else "device"
            table = profiler.key_averages().table(f"self_{kind}_time_total", row_limit=10)
        print0(f"{table}\nwritten: {file}. To view it: https://ui.perfetto.dev")

    # The library behind torch's profiler logs its start and end to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    steps = schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=num_steps, repeat=1)
    profiler = profile(schedule=steps, on_trace_ready=write, acc_events=True)
    profiler.start()
    return profiler
