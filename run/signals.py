"""Signals that ask a run to save and end: SIGTERM, SIGUSR1, SIGHUP and Ctrl-C."""

import os
import signal
from types import FrameType

from run import errors

EXIT_CODES = {
    signal.SIGTERM: errors.PREEMPTED,
    signal.SIGUSR1: errors.PREEMPTED,
    signal.SIGHUP: errors.PREEMPTED,
    signal.SIGINT: errors.INTERRUPTED,
}


class Signals:
    """Inside `with`, a signal ends the process at once; after `arm` it sets `code` instead.

    A second Ctrl-C ends a lone process at once; torchrun may send its processes the same one twice.
    """

    def __init__(self):
        self.code = 0  # the exit code that a signal asked for
        self.is_armed = False
        self.previous_handlers = {}

    def __enter__(self) -> "Signals":
        for number in EXIT_CODES:
            # nohup ignores SIGHUP, and so do we
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self.previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if "RANK" in os.environ:  # torchrun may still send signals
            return
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From now on a signal lets the run save: there is something to save."""
        self.is_armed = True

    def disarm(self) -> None:
        """From now on a signal ends the process at once, as while compiling.

        Compiling takes longer than the few steps before it, which are lost.
        """
        self.is_armed = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        is_repeated = self.code != 0 and number == signal.SIGINT and "RANK" not in os.environ
        if not self.is_armed or is_repeated:
            loss = "there was nothing new to save"
            if is_repeated:
                loss = "what came after the last save is lost"
            errors.exit_with(
                EXIT_CODES[number],
                f"ended at once, {loss} ({name}). fix: call it again, with resume=true to go on",
            )
        if self.code == 0:
            self.code = EXIT_CODES[number]
            # Over a progress bar. The handler may have interrupted a print, so it uses none.
            start = "\r\033[K" if os.isatty(2) else ""
            again = " again" if number == signal.SIGINT else ""
            text = f"{start}{name}: saving after this step; Ctrl-C{again} ends at once, unsaved\n"
            os.write(2, text.encode())
