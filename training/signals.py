"""What the system or the user asks of a run by SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: to save, and to end."""

import os
import signal
from types import FrameType

from common import errors

CODES = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), errors.PREEMPTED)
CODES[signal.SIGINT] = errors.INTERRUPTED


class Signals:
    """Inside `with`, a signal ends the process at once, until `note` is called: then it is kept in `code`.

    A second Ctrl-C ends a lone process; torchrun sends its processes what they may have had already.
    """

    def __init__(self):
        self.code, self.armed = 0, False

    def __enter__(self) -> "Signals":
        heard = [
            number
            for number in CODES
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
        ]
        self.before = {
            number: signal.signal(number, self._handle) for number in heard
        }  # nohup stays what it is
        return self

    def __exit__(self, *_: object) -> None:
        if "RANK" not in os.environ:  # torchrun may still send some
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def arm(self) -> None:
        self.armed = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        again = self.code != 0 and number == signal.SIGINT and "RANK" not in os.environ
        if not self.armed or again:
            lost = (
                "what came after the last save is lost"
                if again
                else "there was nothing new to save"
            )
            errors.exit_with(
                CODES[number],
                f"ended at once, {lost} ({name}). fix: call it again, with resume=true to go on",
            )
        if not self.code:
            start = "\r\033[K" if os.isatty(2) else ""  # over a progress bar
            os.write(
                2,
                f"{start}{name}: saving after this step; Ctrl-C again ends at once, unsaved\n".encode(),
            )
        self.code = self.code or CODES[number]
