"""What the system or the user asks of a run by SIGTERM, SIGUSR1 and Ctrl-C: to save, and to end."""

import os
import signal
from types import FrameType

from training import errors

CODES = {signal.SIGTERM: errors.PREEMPTED, signal.SIGUSR1: errors.PREEMPTED, signal.SIGINT: errors.INTERRUPTED}


class Signals:
    """Inside `with`, a signal ends the process at once, until `note` is called: then it is kept in `code`.

    A second Ctrl-C ends a lone process; torchrun sends its processes what they may have had already.
    """

    def __init__(self):
        self.code, self.noting = 0, False

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self._handle) for number in CODES}
        return self

    def __exit__(self, *_: object) -> None:
        if "RANK" not in os.environ:  # torchrun may still send some
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def note(self) -> None:
        self.noting = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        again = self.code != 0 and number == signal.SIGINT and "RANK" not in os.environ
        if not self.noting or again:
            name = signal.Signals(number).name
            errors.fail(CODES[number], f"ended at once ({name}). fix: the same words and resume=true")
        self.code = self.code or CODES[number]
