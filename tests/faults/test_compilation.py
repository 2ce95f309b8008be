"""Whatever happens to a compiler, the next command compiles: nothing half-made is ever used."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from run import compilation
from tests.conftest import ROOT, TINY, weights

ISA = "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(pick_vec_isa())"

compiles = pytest.mark.skipif(
    compilation.missing_for_compilation(torch.device("cpu")) is not None,
    reason="needs a C++ compiler",
)


def start_training(folder: Path, story: Path, cache: Path) -> subprocess.Popen:
    """`python train.py` with compilation, in a process group and with a compile cache of its own."""
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    steps = ("steps=2", "save_every=2", "eval_every=2", "sample_every=2")
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "train.py"),
            *TINY,
            *text,
            *steps,
            "model.depth=1",
            "compile=true",
        ],
        cwd=folder,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def empty_libraries(cache: Path) -> set[Path]:
    """The libraries that a compiler has opened and not written to."""
    found = set()
    for path in cache.rglob("*.so*"):
        try:
            if path.stat().st_size == 0:
                found.add(path)
        except FileNotFoundError:  # it got its name in between
            continue
    return found


def vector_isa(cache: Path) -> str:
    """What torch's probes of the instruction set find with this cache."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", ISA], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


@compiles
@pytest.mark.parametrize(
    "number, victim, code",
    [
        # In torch's probe of the instruction set, and in a library of the training step.
        (signal.SIGKILL, "", -signal.SIGKILL),
        pytest.param(signal.SIGINT, "main.so", 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "main.so", 75, marks=pytest.mark.long),
    ],
)
def test_a_killed_compilation_harms_no_later_one(tmp_path, story, number, victim, code):
    cache = tmp_path / "cache"
    training = start_training(tmp_path, story, cache)
    while True:
        assert training.poll() is None, training.communicate()[1]
        # A compiler may remove a folder while it is searched.
        with suppress(FileNotFoundError):
            if any(victim in path.name for path in empty_libraries(cache)):
                break
        time.sleep(0.0005)
    os.killpg(training.pid, number)
    told = training.communicate(timeout=60)[1]
    with suppress(ProcessLookupError):  # compilers that go on, since signals do not reach them
        os.killpg(training.pid, signal.SIGKILL)
    assert training.returncode == code, told
    assert "Traceback" not in told
    assert told.count("error: ") == (number != signal.SIGKILL)

    # A younger library counts as one that is still being written.
    time.sleep(compilation.LINKING_SECONDS)
    training = start_training(tmp_path, story, cache)
    told = training.communicate(timeout=600)[1]
    assert training.returncode == 0, told
    assert vector_isa(cache) == vector_isa(tmp_path / "untouched")


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """A compiler that cannot compile anything."""

    def fail(*_):
        raise RuntimeError("cc1plus: error: out of order")

    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, disable, **_: compile_with(self, backend=fail, disable=disable),
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@compiles
def test_training_goes_on_without_a_compilation_that_fails(trainer_of, broken_compiler, capfd):
    eager, trainer = trainer_of(), trainer_of("compile=auto")
    trainer.is_compiled = True
    for _ in range(3):
        eager.train_step()
        trainer.train_step()
    told = capfd.readouterr().err
    assert told.count("warning: compilation failed") == 2 and "out of order" in told
    assert not trainer.is_compiled
    for name, weight in weights(eager).items():
        assert torch.equal(weight, weights(trainer)[name])


@compiles
def test_a_compilation_that_was_asked_for_and_fails_is_one_line(trainer_of, broken_compiler, capfd):
    trainer = trainer_of("compile=true")
    with pytest.raises(SystemExit) as end:
        trainer.train_step()
    told = capfd.readouterr().err
    assert end.value.code == 2
    assert "error: compilation failed (" in told and told.count("fix: ") == 1
    assert "Traceback" not in told


COMPILING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from run import compilation

@torch.compile(dynamic=False)
def double(x):
    return (2 * x).sum()

compilation.use_cache()
run = lambda: double(torch.ones(33)).item()
print(compilation.compile_and_run(run, is_required=True, option="compile=false"))
"""


@compiles
def test_a_broken_library_is_set_aside(tmp_path):
    """What torch probes for vector instructions is empty, as a killed linker leaves it."""
    cache = tmp_path / "cache"
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILING, str(ROOT)]
    for is_broken in (False, True):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "66.0\n"
        assert ("its cache is moved aside" in done.stderr) == is_broken
        for library in cache.rglob("*.so"):
            library.write_bytes(b"nonsense" if ".main." in library.name else b"")
            os.utime(library, (0, 0))
    aside = cache.with_name("cache-broken")
    assert all(library.stat().st_size > 0 for library in aside.rglob("*.so"))
