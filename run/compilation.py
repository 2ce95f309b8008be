"""torch.compile on this machine: when it saves time, its requirements, cache and failures."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from run import ROOT, errors
from run.cache_folder import compiler_cache, has_locks, temporary_cache
from run.hardware import processor_features
from run.progress import say

PDL = "triton.enable_pdl"  # an option of torch.compile
CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
# Shorter runs take longer with compilation: it takes a minute for the default model on two cores.
LONG_STEPS = 200
LONG_MINUTES = 3
LINKING_SECONDS = 5  # no linker is still writing a library of this age

# torch.compile's cache is in .cache/ if possible, unless $TORCHINDUCTOR_CACHE_DIR is set, which
# importing torch._dynamo does, too. Each combination of torch version, processor and choice of
# instructions ($ATEN_CPU_CAPABILITY) has its own cache: these are not part of torch's keys, and
# machine code that was made for another combination crashes.
MACHINE = sha256(processor_features().encode()).hexdigest()
if CACHE_KEY not in os.environ:
    CACHE = compiler_cache(ROOT / ".cache") / f"compiled-{torch.__version__}-{MACHINE}"
    os.environ[CACHE_KEY] = str(CACHE)


def is_long_run(steps: float, minutes: float | None) -> bool:
    """Whether compiling saves time in a run of at most this many steps and minutes."""
    return steps >= LONG_STEPS and (minutes is None or minutes >= LONG_MINUTES)


def pick_compile(wanted: bool | str, device: torch.device, is_long: bool) -> bool:
    """Whether to compile for `compile=wanted`: auto compiles long runs if the machine can.

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
    """A requirement of torch.compile that this machine lacks; None if it has everything."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        if c_compiler() is None:
            return "a C compiler"
    elif device.type != "cpu":
        return "a CPU or a CUDA device"
    if cpp_compiler() is None:
        return "a C++ compiler"
    return None


def cpp_compiler() -> str | None:
    """The path of the C++ compiler, $CXX or the system's default; None if it does not exist."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


def c_compiler() -> str | None:
    """The C compiler that Triton calls for each kernel's launcher; None if it does not exist."""
    if "CC" in os.environ:
        return shutil.which(os.environ["CC"])
    return shutil.which("gcc") or shutil.which("clang")


def decode_options(device: torch.device) -> dict[str, bool]:
    """Options of torch.compile for a decode step, which on CUDA becomes one CUDA graph."""
    if device.type == "cpu":
        # The code that calls the kernels is in C++. In Python it takes a third of a short step.
        return {"cpp_wrapper": True}
    options = {
        "triton.cudagraphs": True,
        # With this tuning, Inductor fuses matrix products of a single token with the operations
        # around them; only then do they reach peak bandwidth (`mm` in
        # torch/_inductor/decomposition.py).
        "coordinate_descent_tuning": True,
    }
    # From Hopper on, a kernel may start before the one in front of it has ended, and wait for its
    # results only where it reads them: programmatic dependent launch (CUDA C++ Programming Guide).
    has_option = PDL in torch._inductor.list_options()  # torch 2.11 may lack it
    if has_option and torch.cuda.get_device_capability(device)[0] >= 9:
        options[PDL] = True
    return options


def prepare_to_compile() -> None:
    """Let torch.compile find torch in any folder, and clean its cache. Call before compiling."""
    from torch.utils import cpp_extension

    # torch.compile does not quote library folders in a command of the C++ compiler. The folder of
    # torch may be in a clone whose path has spaces.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).with_name("lib")))

    # torch.compile locks the files of its cache.
    cache = Path(os.environ[CACHE_KEY])
    if not has_locks(cache):
        cache = (temporary_cache() or cache.parent) / cache.name
        os.environ[CACHE_KEY] = str(cache)
    clean_cache()


def clean_cache() -> None:
    """Delete incomplete libraries, left by linkers that were killed; wait for running linkers.

    If such a library is one of torch's probes for vector instructions, torch would conclude that
    the processor has none.
    """
    for path in Path(os.environ[CACHE_KEY]).rglob("*.so"):
        with suppress(OSError):  # another process may delete it first
            while is_incomplete(path):
                if time.time() - path.stat().st_mtime > LINKING_SECONDS:
                    path.unlink()
                    break
                time.sleep(0.1)


def is_incomplete(library: Path) -> bool:
    """Whether the first bytes of a library, which a linker writes last, are missing."""
    first_bytes = np.fromfile(library, "u1", count=4)
    return not first_bytes.any()


def compile_and_run(function: Callable[[], object], *, is_required: bool, option: str) -> object:
    """Call a function that torch.compile compiles -> its result, or None if compiling fails.

    A broken file in the cache may be the cause of a failure, so a second attempt uses an empty
    cache. With `is_required`, the last failure ends the process with exit code 2, and its message
    names the `option` that turns compilation off. A signal ends the process without waiting for
    threads that compile.
    """
    attempts = 2
    if "RANK" in os.environ:  # the other processes of the run would wait for a second attempt
        attempts = 1
    for _ in range(attempts):
        try:
            with errors.report_errors():
                return function()
        except SystemExit as exit_request:
            sys.stderr.flush()
            os._exit(exit_request.code)
        except RuntimeError as error:
            problem = compile_problem(error)
            if problem is None:
                raise
            say(f"warning: {problem}: moving the compilation cache aside")
            move_cache_aside()
    if is_required:
        errors.exit_with(errors.INPUT, f"{problem}. fix: {option}")
    return None


def move_cache_aside() -> None:
    """Move the cache on the disk aside, and clear the one in memory."""
    from torch._inductor.utils import clear_caches

    cache = Path(os.environ[CACHE_KEY])
    aside = cache.with_name(f"{cache.name}-broken")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # another process may have moved it
        cache.rename(aside)
    torch.compiler.reset()
    clear_caches()


def compile_problem(error: RuntimeError) -> str | None:
    """The description of an error of torch.compile; None for other errors."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    # One of the lines has the error of the C++ compiler.
    lines = str(error).splitlines()
    reported = lines[0]
    for line in lines:
        if "error: " in line:
            reported = line
            break
    return f"compilation failed ({reported.strip()[:200]})"
