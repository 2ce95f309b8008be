"""Signals that ask a run to save a checkpoint and end: SIGTERM, SIGUSR1, SIGHUP and Ctrl-C."""

import os
import signal
from contextlib import suppress
from types import FrameType

from run import errors
from run.distributed import Ranks

EXIT_CODES = {
    signal.SIGTERM: errors.PREEMPTED,
    signal.SIGUSR1: errors.PREEMPTED,
    signal.SIGHUP: errors.PREEMPTED,
    signal.SIGINT: errors.INTERRUPTED,
}


class Signals:
    """Inside `with`, a signal ends the process at once; between `arm` and `finish`, it is recorded.

    A Ctrl-C after a recorded signal ends a single process at once, but not under torchrun, which
    may send its processes the same Ctrl-C twice.
    """

    def __init__(self):
        self.received = 0  # the exit code requested by a signal to this process; 0 without one
        self.agreed = 0  # the exit code that all ranks have agreed on
        self.is_armed = False
        self.previous_handlers = {}

    def __enter__(self) -> "Signals":
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if "RANK" in os.environ:  # torchrun may still send signals
            return
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Let signals request a save, now that there is something to save."""
        self.is_armed = True

    def finish(self) -> None:
        """Let signals end the process at once again, now that the last step is saved."""
        self.is_armed = False

    def agree(self, ranks: Ranks) -> int:
        """Agree on the exit code that a signal to any rank has requested; 0 without a signal.

        All ranks call this together. Returns `agreed`.
        """
        self.agreed = ranks.all_reduce_max(self.received)
        return self.agreed

    def _handle(self, number: int, _: FrameType | None) -> None:
        is_repeated = self.received != 0 and number == signal.SIGINT and "RANK" not in os.environ
        if is_repeated or not self.is_armed:
            errors.exit_with(
                EXIT_CODES[number], "stopped at once; checkpoints that were already saved are kept"
            )
        # The handler may have interrupted a print, so it must not print. A closed terminal or pipe
        # must not keep the run from saving.
        if self.received == 0:
            self.received = EXIT_CODES[number]
            if errors.is_rank0():
                with suppress(OSError):
                    os.write(2, b"\nsaving after this step\n")
