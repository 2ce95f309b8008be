"""torch.compile on this machine: when it saves time, its requirements, cache and failures."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from time import monotonic

import numpy as np
import torch

from run import errors
from run.hardware import processor_features
from run.paths import cache_folder
from run.progress import print0

PDL = "triton.enable_pdl"  # an option of torch.compile
CACHE_KEY = "TORCHINDUCTOR_CACHE_DIR"
BROKEN = "broken"  # name of a file; a cache folder that contains it is not used again
# Compiling slows down shorter runs, because it takes a minute for the default model on two cores.
LONG_STEPS = 200
LONG_MINUTES = 3

# torch.compile's cache is in our cache folder unless $TORCHINDUCTOR_CACHE_DIR is set; importing
# torch._dynamo also sets it. Each combination of torch version, processor and instruction set
# ($ATEN_CPU_CAPABILITY) has a separate cache, because torch's cache keys do not include all three,
# and machine code compiled for a different combination may crash.
MACHINE = sha256(processor_features().encode()).hexdigest()
CACHE = os.environ.setdefault(
    CACHE_KEY, str(cache_folder() / f"compiled-{torch.__version__}-{MACHINE}")
)


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
        raise ValueError(
            f"torch.compile needs {missing} (compile=true, {device.type}). fix: compile=false "
            "(--compile false)"
        )
    return wanted


def missing_for_compilation(device: torch.device) -> str | None:
    """Return what torch.compile needs and this machine lacks; None if nothing is missing."""
    if device.type == "mps":
        return "a CPU or a CUDA device"
    if cpp_compiler() is None:
        return "a C++ compiler"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        # Triton calls a C compiler for each kernel's launcher.
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if not any(map(shutil.which, names)):
            return "a C compiler"
    return None


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler, $CXX or the default; None if it does not exist."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


def decode_options(device: torch.device) -> dict[str, bool]:
    """Return torch.compile's options for a decode step; on CUDA the step becomes one CUDA graph."""
    if device.type == "cpu":
        # Call the kernels from C++, because calls from Python take a third of a short step. Do not
        # check the shapes of tensors again in each step, which takes a tenth of it.
        return {"cpp_wrapper": True, "size_asserts": False}
    options = {
        "triton.cudagraphs": True,
        # With this tuning, Inductor fuses matrix products of a single token with the operations
        # around them (`mm` in torch/_inductor/decomposition.py).
        "coordinate_descent_tuning": True,
    }
    # On Hopper and newer, a kernel may start before the preceding one has ended, and wait only when
    # it reads that one's results (programmatic dependent launch, CUDA C++ Programming Guide).
    has_option = PDL in torch._inductor.list_options()  # torch 2.11 may lack it
    if has_option and torch.cuda.get_device_capability(device)[0] >= 9:
        options[PDL] = True
    return options


def prepare_to_compile() -> None:
    """Let torch.compile find torch in any folder, and choose its cache. Call before compiling."""
    from torch.utils import cpp_extension

    # torch.compile does not quote library folders in a command of the C++ compiler, and torch may
    # be in a clone whose path contains spaces.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).with_name("lib")))
    use_cache()


def use_cache(excluded: Path | None = None) -> None:
    """Use the first intact folder of CACHE, CACHE-2, CACHE-3 and so on, but not `excluded`.

    Other processes may be using a folder with a broken file, so nothing is deleted.
    """
    for number in count(1):
        folder = Path(CACHE if number == 1 else f"{CACHE}-{number}")
        if folder != excluded and is_intact(folder):
            os.environ[CACHE_KEY] = str(folder)
            return


def is_intact(folder: Path) -> bool:
    """Whether a folder is not marked as BROKEN, and has no library from a linker that was killed.

    The first bytes of a library, which a linker writes last, are then missing or 0. If such a
    library is one of torch's probes for vector instructions, torch would conclude that there are
    none.
    """
    if (folder / BROKEN).exists():
        return False
    for path in folder.rglob("*.so"):
        with suppress(FileNotFoundError):  # a compiler may have renamed it
            if not np.fromfile(path, "u1", count=4).any():
                return False
    return True


def compile_and_run(
    function: Callable[[], object], what: str, is_required: bool, option: str
) -> object:
    """Call a function that torch.compile compiles; return its result, or None if compiling fails.

    A failure may be caused by a broken file in the cache. Without torchrun, a second attempt uses
    another folder. With `is_required`, the last failure ends the process with exit code 2, and its
    message names the `option` that turns compilation off.
    """
    from torch._inductor.utils import clear_caches

    first_cache = Path(os.environ[CACHE_KEY])
    attempts = 2
    if "RANK" in os.environ:  # the other processes of the run would wait for a second attempt
        attempts = 1
    for attempt in range(attempts):
        print0(f"compiling {what} (to skip this: {option})")
        start = monotonic()
        try:
            result = function()
        except RuntimeError as error:
            problem = compile_problem(error)
            if problem is None:
                raise
            print0(f"warning: {problem}")
            use_cache(excluded=first_cache)
            torch.compiler.reset()
            clear_caches()
            continue
        if attempt > 0:  # the failure was caused by the cache, not by the compiler
            (first_cache / BROKEN).touch()
        print0(f"compiled in {monotonic() - start:.0f} s")
        return result
    if is_required:
        errors.exit_with(errors.INPUT, f"{problem}. fix: {option}")
    return None


def compile_problem(error: RuntimeError) -> str | None:
    """Return the description of a torch.compile error; None for other errors."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    # One of the lines may have the C++ compiler's error.
    lines = str(error).splitlines()
    reported = lines[0]
    for line in lines:
        if "error: " in line:
            reported = line
            break
    return f"compilation failed ({reported.strip()[:200]})"
