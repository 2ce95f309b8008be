"""A trace of a few training steps, and the operators that take most of their time."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from run.progress import say, waiting
from training.clock import Clock

SKIPPED_STEPS = 3  # the first steps of a process, which compile and fill caches
TRACE = "trace.json.gz"
LARGEST = 10  # number of operators shown


class StepProfiler:
    """Records `num_steps` steps of a process, after SKIPPED_STEPS, to a run's trace.json.gz.

    If `num_steps` is None, it does nothing. Open the trace at https://ui.perfetto.dev.
    """

    def __init__(self, num_steps: int | None, run_dir: Path, device: torch.device, clock: Clock):
        self.file = run_dir / TRACE
        self.num_steps = num_steps
        self.device = device
        self.clock = clock
        self.has_written = False
        self.profiler = None
        if num_steps is None:
            return
        # The library behind torch's profiler logs its start and end to standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self.write,
            acc_events=True,
        )
        self.profiler.start()

    def step(self) -> None:
        """Count a step."""
        if self.profiler is not None and not self.has_written:
            self.profiler.step()

    def close(self) -> None:
        """Stop recording. Reports if the run was too short for a trace."""
        if self.profiler is None:
            return
        self.profiler.stop()
        if not self.has_written:
            say(
                f"warning: no trace, because the run ended within its first {SKIPPED_STEPS} "
                f"steps, which profile={self.num_steps} skips. fix: train for more steps"
            )

    def write(self, profiler: profile) -> None:
        """Write the trace, and show the operators with the most self time."""
        self.has_written = True
        with self.clock.pause("trace"), waiting("writing the trace"):
            profiler.export_chrome_trace(str(self.file))
            events = profiler.key_averages()
        is_cuda = self.device.type == "cuda"
        times = {}
        for event in events:
            if event.key.startswith("ProfilerStep"):
                continue
            own = event.self_device_time_total if is_cuda else event.self_cpu_time_total
            times[event.key] = (own, event.count)  # microseconds
        total = sum(own for own, _ in times.values()) or 1.0  # there may be no time on the device
        largest = sorted(times.items(), key=lambda item: item[1][0], reverse=True)[:LARGEST]
        lines = [f"the slowest operations in {total / 1e3:,.1f} ms of {self.device.type} time:"]
        for name, (own, count) in largest:
            lines.append(f"{own / total:6.1%} {own / 1e3:10,.2f} ms {count:7,} x  {name[:60]}")
        lines.append(f"written: {self.file}. To view it: https://ui.perfetto.dev")
        say("\n".join(lines))
