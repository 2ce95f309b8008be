"""Processes that start warm: importing torch takes longer than what most of them do."""

import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import IO

import torch
from torch.distributed import TCPStore


class Forked:
    """What `subprocess.Popen` gives for `python FILE WORDS`, by a fork of this process: it has imported all already."""

    def __init__(self, words: list, stdout: IO, stderr: IO, env: dict[str, str], **_):
        self.returncode = None
        self.pid = os.fork()
        if self.pid > 0:
            return
        code = 1
        try:
            torch.set_num_threads(1)  # those of OpenMP do not survive a fork
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.environ.update(env)
            sys.argv = [str(word) for word in words[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def check_signals(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, how: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def ranks(words: list, processes: int, folder: Path) -> tuple[list[int], str]:
    """What torchrun does for `python FILE WORDS` -> the exit codes, and the standard errors of all."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # on a port that is free
    world = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
    }
    world["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with (folder / "stderr").open("w+") as told:
        each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        running = [Forked(words, told, told, world | rank) for rank in each]
        codes = [process.wait() for process in running]
        told.seek(0)
        return codes, told.read()
