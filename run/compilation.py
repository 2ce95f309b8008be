"""torch.compile on this machine: what it needs, and a cache whose files are always complete."""

import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import torch

from run import errors
from run.hardware import processor_features
from run.instantiate import ROOT

USER_CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # read before torch puts its default there
SCRIPTS = "compiler-scripts"  # a folder in the cache
STALE_SECONDS = 3600  # age at which no compiler is writing a temporary file any more

# torch lets the compiler write to the path that it later trusts, so a compiler that is killed
# leaves a library of 0 bytes for good. This script renames an output file when it is complete. It
# ignores the signals of the terminal, which are meant for the training process alone.
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
    """Whether to compile for `compile=wanted`, and the reason.

    Raises ValueError if compilation is asked for and the machine lacks something for it.
    """
    missing = missing_for_compilation(device)
    if wanted is True and missing:
        raise ValueError(
            f"torch.compile needs {missing} (compile=true, {device.type}). "
            "fix: install it, or compile=false"
        )
    if wanted != "auto":
        return wanted, "as asked"
    if missing:
        return False, f"no {missing}"
    return is_long, "where it pays"


def missing_for_compilation(device: torch.device) -> str | None:
    """What torch.compile needs and this machine does not have; None if it has everything."""
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
    """The path of the C++ compiler: $CXX, or the default of the system."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX", default))


def use_cache(folder: Path = ROOT / ".cache") -> None:
    """Keep the files of torch.compile in `folder`, where a file gets its name once it is complete.

    Each processor, compiler and version of torch has a cache of its own. If
    $TORCHINDUCTOR_CACHE_DIR is set, torch's files stay there.
    """
    folder = folder.absolute()
    compiler = cpp_compiler()
    if compiler is None or Path(compiler).parent.name == SCRIPTS:  # none, or set up already
        return

    # torch's own cache keys leave out some of what determines the machine code.
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    identity = [torch.__version__, compiler, capability, *processor_features()]
    key = sha256("\n".join(identity).encode()).hexdigest()[:16]
    cache = folder / f"compiled-{key}"
    if not is_writable(cache):  # it may be another user's
        cache = Path(tempfile.gettempdir(), f"attend-{os.getuid()}-{key}")
    scripts = cache / SCRIPTS
    scripts.mkdir(parents=True, exist_ok=True)
    remove_leftovers(cache)

    # The script has the name of the compiler, by which torch recognizes it.
    script = scripts / Path(compiler).name
    temporary = script.with_name(f"{script.name}.{os.getpid()}.tmp")
    temporary.write_text(COMPILER_SCRIPT.format(compiler=shlex.quote(compiler)))
    temporary.chmod(0o755)
    temporary.replace(script)

    # Put the script in front of the compiler, for torch and for its subprocesses.
    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    os.environ["CXX"] = script.name
    if USER_CACHE is None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._inductor import config  # imported here, since it reads the environment

    config.cpp.cxx = (None, script.name)


def is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder. Creates the folder if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def remove_leftovers(cache: Path) -> None:
    """Delete old temporary files of killed compilers, and libraries that are empty."""
    for folder, _, names in os.walk(cache):  # it skips what other processes remove meanwhile
        for name in names:
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # another process may be removing it too
                status = path.stat()
                is_old = time.time() - status.st_mtime > STALE_SECONDS
                is_empty = status.st_size == 0
                if (path.suffix == ".tmp" and is_old) or (path.suffix == ".so" and is_empty):
                    path.unlink()


@contextmanager
def exit_without_waiting() -> Iterator[None]:
    """On a SystemExit raised inside, end the process without waiting for threads that compile."""
    try:
        yield
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def expected_seconds(depth: int, device: torch.device) -> float:
    """About how long forward and backward of `depth` layers take to compile with an empty cache.

    It is infinite where they cannot be compiled.
    """
    if missing_for_compilation(device) is not None:
        return math.inf
    if device.type == "cuda":
        return 40.0
    return 10.0 + 10.0 * depth


def is_compile_error(error: RuntimeError) -> bool:
    """Whether an error is one of torch.compile itself, not of the compiled code."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def first_error_line(error: Exception) -> str:
    """The line of a compilation error that says what went wrong, at most 200 characters of it."""
    text = str(error).strip() or type(error).__name__
    # A C++ compiler says it in a line of its own.
    match = re.search(".*error: .*", text)
    line = match[0] if match else text.partition("\n")[0]
    return line.strip()[:200]


def exit_failed(problem: str, option: str) -> NoReturn:
    """End with exit code 2 after a compilation that failed, where `option` asked for it."""
    errors.exit_with(
        errors.INPUT,
        f"compilation failed ({problem}). fix: {option}, or another C++ compiler in $CXX",
        rank0_only=True,
    )
