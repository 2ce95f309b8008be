"""Start processes as forks, because importing torch would take most of their time."""

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO

import torch
from torch.distributed import TCPStore

from run.errors import hard_exit

LONG = 600  # timeout in seconds for other processes, generous for a loaded machine
# Modules that train.py imports inside functions.
LATE = (
    "hydra._internal.hydra",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torch.distributed.fsdp",
)


class Forked:
    """Like `subprocess.Popen` for `python FILE ARGUMENTS`, but forks this process."""

    def __init__(
        self,
        command: list,
        stdout: IO,
        stderr: IO,
        env: dict[str, str],
        starter: int | None = None,  # a pipe from which the child reads a byte before it begins
        **_,
    ):
        self.returncode = None
        for module in LATE:
            import_module(module)
        self.pid = os.fork()
        if self.pid > 0:
            return
        # The child must end with os._exit and never return to the tests.
        with hard_exit():
            torch.set_num_threads(1)  # OpenMP threads do not survive a fork
            gc.freeze()  # garbage collection would copy the memory shared with the parent
            signal.alarm(LONG // 2)  # a fork may inherit a held lock
            if starter is not None:
                os.read(starter, 1)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ.update(env)
            sys.argv = [str(argument) for argument in command[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def ranks(
    command: list, world_size: int, folder: Path, meanwhile: Callable = lambda processes: None
) -> tuple[list[int], str]:
    """Run `python FILE ARGUMENTS` like torchrun; return the exit codes and stderr of all ranks."""
    # Port 0 lets the system choose a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # Fork all ranks before one of them connects to the store: a fork while the store's thread holds
    # a lock would wait for this lock forever.
    starter, start = os.pipe()
    with (folder / "stderr").open("w+", encoding="utf-8") as stderr:
        processes = []
        for rank in range(world_size):
            env = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(Forked(command, stderr, stderr, env, starter))
        os.write(start, bytes(world_size))
        os.close(starter)
        os.close(start)
        meanwhile(processes)
        exit_codes = [process.wait() for process in processes]
        stderr.seek(0)
        return exit_codes, stderr.read()
