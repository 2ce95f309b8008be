"""compile=auto: whether compiling the training step saves time, by what it took and saved before.

Eager and compiled steps differ in their last bits, so a run chooses once, after TIMED_STEPS steps.
"""

import json
import math
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from run import compilation
from run.instantiate import ROOT

TIMED_STEPS = 3  # eager steps before the choice; the last of them is timed
# Where nothing is known yet. On two CPU cores, model=small compiled in 66 s, and in 13 to 23 s from
# then on; a compiled step took 0.52 of an eager one's time.
STEP_RATIO = 0.6  # time of a compiled step, relative to an eager one
CACHED_SHARE = 0.25  # time of a compilation with a warm cache, relative to a cold one


# Settings besides machine and model that change what is compiled.
COMPILED_OPTIONS = ("document_mask", "sharded", "activation_checkpointing", "z_loss", "distill")


class CompileRecord:
    """Seconds that compiling takes, and the time of a compiled step relative to an eager one.

    They are stored in a file named by a hash of what they depend on: `settings` and model/.
    `cold_seconds` is an estimate for the first time; infinite where nothing can be compiled.
    """

    def __init__(self, settings: list, cold_seconds: float):
        code = sha256(json.dumps(settings).encode())
        for file in sorted((ROOT / "model").rglob("*.py")):
            code.update(file.read_bytes())
        key = code.hexdigest()[:16]
        self.path = Path(compilation.USER_CACHE or ROOT / ".cache", f"compile-time-{key}.json")
        self.seconds = cold_seconds
        self.step_ratio = STEP_RATIO
        if cold_seconds == math.inf:
            return
        with suppress(OSError, ValueError):
            self.seconds, self.step_ratio = json.loads(self.path.read_text())

    def pays(self, eager_seconds: float) -> bool:
        """Whether to compile, where eager steps would take so many seconds to the end."""
        return self.seconds + self.step_ratio * eager_seconds < eager_seconds

    def add(self, seconds: float, step_seconds: float, eager_step_seconds: float) -> None:
        """Store what a compilation took, and what it saves where an eager step was timed too."""
        self.seconds = seconds
        if not self.path.exists():  # the next one will find the files of this one
            self.seconds *= CACHED_SHARE
        if eager_step_seconds > 0:  # times vary: the mean of what was known and what is
            self.step_ratio = (self.step_ratio + step_seconds / eager_step_seconds) / 2
        with suppress(OSError):
            self.path.write_text(json.dumps([self.seconds, self.step_ratio]))


def is_long_run(settings: dict) -> bool:
    """Whether compiling pays in a run, without a step that was timed."""
    steps = settings["steps"] or math.inf
    minutes = settings["max_minutes"] or math.inf
    return steps >= 200 and minutes >= 3
