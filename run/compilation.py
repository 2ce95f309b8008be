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

from run import errors
from run.cache_folder import cache_folder
from run.hardware import processor_features
from run.progress import say

PDL = "triton.enable_pdl"  # an option of torch.compile
CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
# Compiling slows down shorter runs, because it takes a minute for the default model on two cores.
LONG_STEPS = 200
LONG_MINUTES = 3
LINKING_SECONDS = 5  # a library of this age is no longer being written by a linker

# torch.compile's cache is in ours unless $TORCHINDUCTOR_CACHE_DIR is set, which importing
# torch._dynamo also sets. Each combination of torch version, processor and instruction set
# ($ATEN_CPU_CAPABILITY) has a separate cache, because torch's cache keys do not include them and
# machine code compiled for a different combination crashes.
MACHINE = sha256(processor_features().encode()).hexdigest()
if CACHE_KEY not in os.environ:
    CACHE = cache_folder() / f"compiled-{torch.__version__}-{MACHINE}"
    os.environ[CACHE_KEY] = str(CACHE)


def is_long_run(steps: float, minutes: float | None) -> bool:
    """Whether compiling saves time in a run with at most this many steps and minutes."""
    return steps >= LONG_STEPS and (minutes is None or minutes >= LONG_MINUTES)


def pick_compile(wanted: bool | str, device: torch.device, is_long: bool) -> bool:
    """Whether to compile for `compile=wanted`; auto compiles long runs if this machine can compile.

    Raises ValueError if compilation is requested but a requirement is missing on this machine.
    """
    missing = missing_for_compilation(device)
    if wanted == "auto":
        return is_long and missing is None
    if wanted and missing is not None:
        fix = "set compile=false (--compile false)"
        if can_compile_for(device):
            fix = f"install it, or {fix}"
        raise ValueError(f"torch.compile needs {missing} (compile=true, {device.type}). fix: {fix}")
    return wanted


def can_compile_for(device: torch.device) -> bool:
    """Whether torch.compile supports this kind of device, if everything it needs is installed."""
    return device.type in ("cpu", "cuda")


def missing_for_compilation(device: torch.device) -> str | None:
    """The requirement of torch.compile that this machine lacks; None if nothing is missing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        if c_compiler() is None:
            return "a C compiler"
    elif not can_compile_for(device):
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
    """Return torch.compile's options for a decode step; on CUDA the step becomes one CUDA graph."""
    if device.type == "cpu":
        # Call the kernels from C++, because calls from Python take a third of a short step. Do not
        # check the shapes of tensors again in each step, which takes a tenth of it.
        return {"cpp_wrapper": True, "size_asserts": False}
    options = {
        "triton.cudagraphs": True,
        # With this tuning, Inductor fuses matrix products of a single token with the operations
        # around them; only then do they reach peak bandwidth (`mm` in
        # torch/_inductor/decomposition.py).
        "coordinate_descent_tuning": True,
    }
    # On Hopper and newer, a kernel may start before the preceding one has ended, and wait only when
    # it reads its results (programmatic dependent launch, CUDA C++ Programming Guide).
    has_option = PDL in torch._inductor.list_options()  # torch 2.11 may lack it
    if has_option and torch.cuda.get_device_capability(device)[0] >= 9:
        options[PDL] = True
    return options


def prepare_to_compile() -> None:
    """Let torch.compile find torch in any folder, and clean its cache. Call before compiling."""
    from torch.utils import cpp_extension

    # torch.compile does not quote library folders in a command of the C++ compiler, and torch may
    # be in a clone whose path contains spaces.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).with_name("lib")))
    clean_cache()


def clean_cache() -> None:
    """Delete incomplete libraries, left by linkers that were killed; wait for running linkers.

    If such a library is one of torch's probes for vector instructions, torch would conclude that
    the processor has no vector instructions.
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
    """Call a function that torch.compile compiles; return its result, or None if compiling fails.

    A failure may be caused by a broken file in the cache, so a second attempt uses an empty cache.
    With `is_required`, the last failure ends the process with exit code 2, and its message names
    the `option` that turns compilation off. A signal raises HardExit, because an ordinary exit
    would wait for compiler threads.
    """
    attempts = 2
    if "RANK" in os.environ:  # the other processes of the run would wait for a second attempt
        attempts = 1
    for _ in range(attempts):
        try:
            with errors.report_errors():
                return function()
        except SystemExit as exit_request:
            raise errors.HardExit(exit_request.code) from None
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
    """Move the on-disk cache aside, and clear the in-memory cache."""
    from torch._inductor.utils import clear_caches

    cache = Path(os.environ[CACHE_KEY])
    aside = cache.with_name(f"{cache.name}-broken")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # another process may have moved it
        cache.rename(aside)
    torch.compiler.reset()
    clear_caches()


def compile_problem(error: RuntimeError) -> str | None:
    """Return the description of a torch.compile error; None for other errors."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    # One of the lines has the C++ compiler's error.
    lines = str(error).splitlines()
    reported = lines[0]
    for line in lines:
        if "error: " in line:
            reported = line
            break
    return f"compilation failed ({reported.strip()[:200]})"
