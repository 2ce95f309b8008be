"""torch.compile on this machine: when it pays, what it needs, its cache, and its failures."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from run import errors
from run.hardware import processor_features
from run.instantiate import ROOT

CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
# Shorter runs take longer with compilation: a minute, for the default model on two cores.
LONG_STEPS = 200
LONG_MINUTES = 3
LINKING_SECONDS = 5  # an age at which no linker is writing a library any more

# What torch.compile makes is kept in .cache/, unless $TORCHINDUCTOR_CACHE_DIR is set, which
# importing torch._dynamo does too. Each version of torch, processor and choice of its instructions
# ($ATEN_CPU_CAPABILITY) has a cache of its own: torch's keys leave these out, and running the
# machine code of another one crashes.
MACHINE = sha256(processor_features().encode()).hexdigest()
os.environ.setdefault(CACHE_KEY, f"{ROOT}/.cache/compiled-{torch.__version__}-{MACHINE}")


def is_long_run(steps: float, minutes: float | None) -> bool:
    """Whether compiling pays in a run of so many steps and minutes at most."""
    return steps >= LONG_STEPS and (minutes is None or minutes >= LONG_MINUTES)


def pick_compile(wanted: bool | str, device: torch.device, is_long: bool) -> bool:
    """Whether to compile for `compile=wanted`; auto does so where it can and the run `is_long`.

    Raises ValueError if compilation is asked for and the machine lacks something for it.
    """
    missing = missing_for_compilation(device)
    if wanted == "auto":
        return is_long and missing is None
    if wanted and missing is not None:
        raise ValueError(
            f"torch.compile needs {missing} (compile=true, {device.type}). "
            "fix: install it, or compile=false"
        )
    return wanted


def missing_for_compilation(device: torch.device) -> str | None:
    """What torch.compile needs and this machine does not have; None if it has everything."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
    elif device.type != "cpu":
        return "a CPU or a CUDA device"
    return "a C++ compiler" if cpp_compiler() is None else None


def cpp_compiler() -> str | None:
    """The path of the C++ compiler: $CXX, or the default of the system."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


def clean_cache() -> None:
    """Delete the libraries of linkers that were killed, which write a file's first bytes last.

    Where it is one of torch's probes, torch would conclude that there are no vector instructions.
    """
    for path in Path(os.environ[CACHE_KEY]).rglob("*.so"):
        with suppress(OSError):  # deleted, here or by another process
            while not np.fromfile(path, "u1", 4).any():
                if time.time() - path.stat().st_mtime > LINKING_SECONDS:
                    path.unlink()
                time.sleep(0.1)


def compile_and_run(run: Callable[[], object], *, is_required: bool, option: str) -> object:
    """Run what torch.compile compiles as it runs -> its result, or None where that fails twice.

    A failure may be due to a broken file in the cache, so the second attempt has an empty one. If
    it `is_required`, the last failure ends the process with exit code 2, and names the `option` to
    go on without it. A signal ends the process without waiting for threads that compile.
    """
    # The other processes of a run would wait for one that begins anew.
    attempts = 1 if "RANK" in os.environ else 2
    for _ in range(attempts):
        try:
            with errors.report_errors():
                return run()
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(end.code)
        except RuntimeError as error:
            problem = compile_problem(error)
            if problem is None:
                raise
            print(f"warning: {problem}: its cache is moved aside", file=sys.stderr)
            move_cache_aside()
    if is_required:
        errors.exit_with(errors.INPUT, f"{problem}. fix: {option}")
    return None


def move_cache_aside() -> None:
    """Begin with an empty cache, on the disk and in memory."""
    from torch._inductor.utils import clear_caches

    cache = Path(os.environ[CACHE_KEY])
    aside = cache.with_name(f"{cache.name}-broken")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # another process may have done it
        cache.rename(aside)
    torch.compiler.reset()
    clear_caches()


def compile_problem(error: RuntimeError) -> str | None:
    """What went wrong in torch.compile; None for an error that is not one of torch.compile."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    # A C++ compiler says it in a line of its own.
    lines = str(error).splitlines()
    reported = next((line for line in lines if "error: " in line), lines[0])
    return f"compilation failed ({reported.strip()[:200]})"
