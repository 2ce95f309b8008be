"""torch.compile on this machine: what it needs, and a cache in which every file is whole."""

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import torch

from common import errors
from common.hardware import processor_features
from common.instantiate import ROOT

USER_CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # read before torch puts its default there
SCRIPTS = "compiler-scripts"  # a folder of the cache
STALE_SECONDS = 3600  # age of a temporary file that no compiler is writing any more

# torch lets the compiler write straight to the path that it later trusts, so that a compiler that
# is cut off leaves a library of 0 bytes for good. Under this script an output file gets its name
# when it is whole. The terminal's signals are for training, not for its compilers.
COMPILER_SCRIPT = """#!/bin/sh
trap '' INT QUIT HUP
output= previous=
for argument do
    shift
    if [ "$previous" = -o ]; then
        output=$argument
        argument=$argument.$$.tmp
    fi
    previous=$argument
    set -- "$@" "$argument"
done
{compiler} "$@" || exit
[ -z "$output" ] || mv -f "$output.$$.tmp" "$output"
"""


def pick_compile(wanted: bool | str, device: torch.device, is_long: bool) -> tuple[bool, str]:
    """Whether to compile, and why.

    Raises ValueError where compilation is asked for and the machine lacks something for it.
    """
    missing = missing_for_compilation(device)
    if wanted is True and missing:
        problem = f"torch.compile needs {missing} (compile=true, {device.type})"
        raise ValueError(f"{problem}. fix: install it, or compile=false")
    if wanted != "auto":
        return wanted, "as asked"
    if missing:
        return False, f"no {missing}"
    return is_long, "a long run" if is_long else "a short run"


def missing_for_compilation(device: torch.device) -> str | None:
    """What torch.compile needs and this machine does not have."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
    elif device.type != "cpu":
        return "a CPU or a CUDA device"
    if cpp_compiler() is None:
        return "a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers"
    return None


def cpp_compiler() -> str | None:
    """The path of the C++ compiler, from $CXX or by its usual name."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", usual))


def use_cache(folder: Path = ROOT / ".cache") -> None:
    """Let torch.compile keep its files below `folder`, where a file that has its name is whole.

    Processors, compilers and versions of torch have a cache each. $TORCHINDUCTOR_CACHE_DIR, if
    set, stays where torch keeps its files.
    """
    folder = folder.absolute()
    compiler = cpp_compiler()
    if compiler is None or Path(compiler).parent.name == SCRIPTS:  # none, or set up already
        return

    # a cache for what decides on machine code and is not in torch's own keys
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    identity = [torch.__version__, compiler, capability, *processor_features()]
    key = sha256("\n".join(identity).encode()).hexdigest()[:16]
    cache = folder / f"compiled-{key}"
    if not is_writable(cache):  # such as another user's
        cache = Path(tempfile.gettempdir(), f"attend-{os.getuid()}-{key}")
    scripts = cache / SCRIPTS
    scripts.mkdir(parents=True, exist_ok=True)
    remove_leftovers(cache)

    # the script goes by the compiler's name, from which torch tells which compiler it is
    script = scripts / Path(compiler).name
    temporary = script.with_name(f"{script.name}.{os.getpid()}.tmp")
    temporary.write_text(COMPILER_SCRIPT.format(compiler=shlex.quote(compiler)))
    temporary.chmod(0o755)
    temporary.replace(script)

    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    os.environ["CXX"] = script.name
    if USER_CACHE is None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._inductor import config  # which reads the environment

    config.cpp.cxx = (None, script.name)


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def remove_leftovers(cache: Path) -> None:
    """Delete what compilers that were killed have left, and libraries that lost their content."""
    for folder, _, names in os.walk(cache):  # which passes over what other processes remove
        for name in names:
            path = Path(folder, name)
            if path.suffix not in (".tmp", ".so"):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            is_stale = path.suffix == ".tmp" and time.time() - status.st_mtime > STALE_SECONDS
            if is_stale or (path.suffix == ".so" and status.st_size == 0):
                path.unlink(missing_ok=True)


@contextmanager
def exit_without_waiting() -> Iterator[None]:
    """End the process, where that is raised inside, without waiting for compilers in threads."""
    try:
        yield
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def expected_seconds(depth: int, device: torch.device) -> float:
    """About how long forward and backward of so many layers take to compile, from nothing."""
    return 40.0 if device.type == "cuda" else 10.0 + 10.0 * depth


def is_compile_error(error: RuntimeError) -> bool:
    """Whether the error is torch.compile's, and not one of what was compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def first_error_line(error: Exception) -> str:
    """The line of a compilation's error that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_compiler = [line for line in lines if "error: " in line]
    return (of_compiler or lines or [type(error).__name__])[0][:200]


def exit_failed(problem: str, option: str) -> NoReturn:
    """End with exit code 2 after a compilation that failed, where `option` asked for it."""
    fix = f"{option}, or another C++ compiler in $CXX"
    errors.exit_with(errors.INPUT, f"compilation failed ({problem}). fix: {fix}", rank0_only=True)
