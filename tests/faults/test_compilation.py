"""After a failed or killed compilation, later commands compile and use no incomplete file."""

import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.utils import cpp_extension

from run import compilation, errors
from run.paths import cache_folder
from tests.conftest import LONG, ROOT, TINY, weights
from tests.faults.harness import forked
from train import take_step

COMPILING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import train  # imports the same modules as training, in the same order
from run import compilation
from torch._inductor import config, cpu_vec_isa

# Probe only one vector instruction set (AVX2 on x86), precompile no header for
# later kernels, and start no worker processes for compilation: each takes seconds.
del cpu_vec_isa.supported_vec_isa_list[:3]
config.cpp_cache_precompile_headers = False
config.compile_threads = 1

@torch.compile(dynamic=False, options=compilation.decode_options(torch.device("cpu")))
def double(x):
    return (2 * x).sum()

compilation.prepare_to_compile()
run = lambda: double(torch.ones(33)).item()
result = compilation.compile_and_run(run, "a sum", is_required=True, option="compile=false")
print(result, bool(cpu_vec_isa.pick_vec_isa()))
"""


def test_each_instruction_set_has_a_separate_cache(monkeypatch):
    caches = set()
    for capability in ("DEFAULT", "AVX2"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored after the test
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        caches.add(Path(runpy.run_path(compilation.__file__)["CACHE"]))
    assert len(caches) == 2
    assert {cache.parent for cache in caches} == {cache_folder()}


compiles = pytest.mark.skipif(
    compilation.missing_for_compilation(torch.device("cpu")) is not None,
    reason="needs a C++ compiler",
)


def start(cache: Path, *command: str) -> subprocess.Popen:
    """Start Python in a new process group with a separate compilation cache."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cache.parent,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def interrupt(process: subprocess.Popen, cache: Path, victim: str, number: int) -> str:
    """Send a signal while a library matching `victim` is still empty; return the stderr."""
    sizes = []
    while 0 not in sizes:
        assert process.poll() is None, process.communicate()[1]
        # The compiler may rename a file or remove a folder during the search.
        with suppress(FileNotFoundError):
            sizes = [path.stat().st_size for path in cache.rglob(f"*.{victim}*")]
        time.sleep(0.0005)
    os.killpg(process.pid, number)
    messages = process.communicate(timeout=LONG)[1]
    with suppress(ProcessLookupError):  # kill compilers that did not receive the signal
        os.killpg(process.pid, signal.SIGKILL)
    return messages


@pytest.mark.long
@compiles
def test_killed_compilations_and_broken_libraries_do_not_affect_later_compilations(tmp_path):
    """Tests empty instruction-set probes, as left by a killed linker, and corrupt kernels."""
    cache = tmp_path / "cache"
    command = ("-c", COMPILING, str(ROOT))
    killed = start(cache, *command)
    interrupt(killed, cache, "so", signal.SIGKILL)  # in the first instruction-set probe
    assert killed.returncode == -signal.SIGKILL
    # Broken libraries stay, because another process might be using them.
    for number, broken in ((2, b""), (3, b"nonsense"), (4, None)):
        printed, messages = start(cache, *command).communicate(timeout=LONG)
        assert printed == "66.0 True\n", messages
        assert ("warning: compilation failed" in messages) == (number == 4)
        libraries = [*tmp_path.glob(f"cache-{number}/**/*.main.so")]
        assert libraries and not (tmp_path / f"cache-{number + 1}").exists()
        for library in libraries:
            if broken is not None:
                library.write_bytes(broken)
    # The folder with the failure is not tried again.
    printed, messages = start(cache, *command).communicate(timeout=LONG)
    assert printed == "66.0 True\n" and "warning" not in messages


def test_a_command_cleans_up_and_does_not_wait_for_threads(capfd):
    def command() -> None:
        Thread(target=time.sleep, args=(LONG,)).start()
        with errors.hard_exit(), errors.report_errors():
            try:
                raise KeyboardInterrupt
            finally:
                print("cleaned up")

    assert forked(command) == 130
    assert capfd.readouterr().out == "cleaned up\n"


@pytest.mark.long
@compiles
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_during_compilation_ends_the_run_and_does_not_affect_later_runs(
    tmp_path, story, number, code
):
    cache = tmp_path / "cache"
    words = ("steps=2", "save_every=2", "model.depth=1", "compile=true")
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    command = (str(ROOT / "train.py"), *TINY, *text, *words)
    training = start(cache, *command)
    messages = interrupt(training, cache, "main.so", number)
    assert training.returncode == code, messages
    assert "Traceback" not in messages and messages.count("error: ") == 1
    again = start(cache, *command)
    messages = again.communicate(timeout=LONG)[1]
    assert again.returncode == 0, messages


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """Make every compilation fail."""

    def fail(*_):
        raise RuntimeError("cc1plus: error: out of order")

    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: compile_with(self, backend=fail)
    )
    monkeypatch.setattr(compilation, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with torch.compiler.set_stance("default"):  # restored after the test
        yield


@compiles
def test_training_continues_uncompiled_if_compilation_fails(run_of, broken_compiler, capfd):
    eager, run = run_of(), run_of("compile=auto")
    run.trainer.is_compiled = True
    for _ in range(3):
        take_step(eager)
        take_step(run)
    assert capfd.readouterr().err.count("warning: compilation failed") == 2
    assert not run.trainer.is_compiled
    for name, weight in weights(eager).items():
        assert torch.equal(weight, weights(run)[name])


@compiles
def test_a_requested_compilation_that_fails_ends_the_run(run_of, broken_compiler, capfd):
    run = run_of("compile=true")
    with pytest.raises(SystemExit) as end:
        take_step(run)
    *_, line = capfd.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ") and "compile=false" in line


@compiles
def test_a_clone_whose_path_has_spaces_is_quoted_for_the_compiler(monkeypatch):
    """The virtual environment is inside the clone, as in the README."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    monkeypatch.setattr(torch, "__file__", "/My Projects/torch/__init__.py")
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compilation.CACHE)
    compilation.prepare_to_compile()
    builder = CppBuilder(name="kernel", sources="kernel.cpp", BuildOption=CppTorchOptions())
    assert "-L/My Projects/torch/lib" in shlex.split(builder.get_command_line())
