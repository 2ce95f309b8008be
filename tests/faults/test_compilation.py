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
from torch._inductor import config

from run import compilation
from tests.conftest import ROOT, TINY, weights
from tests.faults.harness import wait_for

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
def test_a_killed_compilation_harms_no_later_one(tmp_path, story):
    cache = tmp_path / "cache"
    # in torch's probe of the instruction set, and in two libraries of the training step
    interruptions = {signal.SIGKILL: "", signal.SIGINT: "main.so", signal.SIGTERM: "main.so"}
    codes = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 75}
    seen = set()
    for number, kind in interruptions.items():
        training = start_training(tmp_path, story, cache)
        victims = set()
        while not victims:
            assert training.poll() is None, training.communicate()[1]
            # A compiler may remove a folder while it is searched.
            with suppress(FileNotFoundError):
                victims = {path for path in empty_libraries(cache) - seen if kind in path.name}
            time.sleep(0.0005)
        os.killpg(training.pid, number)
        told = training.communicate(timeout=60)[1]
        with suppress(ProcessLookupError):  # compilers that go on, since signals do not reach them
            os.killpg(training.pid, signal.SIGKILL)
        seen |= empty_libraries(cache)
        assert training.returncode == codes[number], told
        assert "Traceback" not in told
        assert told.count("error: ") == (number != signal.SIGKILL)

    training = start_training(tmp_path, story, cache)
    told = training.communicate(timeout=600)[1]
    assert training.returncode == 0, told
    assert "compiled in" in told
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["text-tiny-gqa"]
    assert vector_isa(cache) == vector_isa(tmp_path / "untouched")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_output_has_its_name_when_it_is_whole(tmp_path, monkeypatch, number):
    """A compiler that takes its time, and a terminal that signals everybody in the meantime."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\n"
        f"printf ha > $2\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.01; done\nprintf lf >> $2\n"
    )
    compiler.chmod(0o755)
    for name in ("PATH", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compilation, "USER_CACHE", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "torch's default, which it sets when it likes")
    with config.patch({"cpp.cxx": config.cpp.cxx}):
        compilation.use_cache(tmp_path / "cache")
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path / "cache"

    output = tmp_path / "a library.so"
    command = [compilation.cpp_compiler(), "-shared", "source.cpp", "-o", str(output)]
    running = subprocess.Popen(command, start_new_session=True)
    wait_for(lambda: [path for path in tmp_path.glob("a library.so.*") if path.read_text() == "ha"])
    os.killpg(running.pid, number)
    assert not output.exists()
    (tmp_path / "go").touch()
    assert running.wait(timeout=60) == 0
    assert output.read_text() == "half" and not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """A compiler that cannot compile a kernel; it answers all that torch asks of a compiler."""
    compiler = tmp_path / "broken" / "g++"
    compiler.parent.mkdir()
    real = compilation.cpp_compiler()
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *main.so*) echo "cc1plus: error: out of order" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation, "use_cache", lambda: None)  # has a compiler of its own
    torch._dynamo.reset()
    with config.patch({"cpp.cxx": (None, str(compiler))}):
        yield compiler
    torch._dynamo.reset()
    torch.compiler.set_stance("default")


@compiles
def test_training_goes_on_without_a_compilation_that_fails(trainer_of, broken_compiler, capfd):
    eager = trainer_of()
    for _ in range(3):
        eager.train_step()

    trainer = trainer_of("compile=auto")
    trainer.compile_first_step()
    told = capfd.readouterr().err
    assert "warning: compilation failed" in told and "out of order" in told
    for _ in range(3):
        trainer.train_step()
    for name, weight in weights(eager).items():
        assert torch.equal(weight, weights(trainer)[name])


@compiles
def test_a_compilation_that_was_asked_for_and_fails_is_one_line(trainer_of, broken_compiler, capfd):
    trainer = trainer_of("compile=true")
    with pytest.raises(SystemExit) as end:
        trainer.compile_first_step()
    told = capfd.readouterr().err
    assert end.value.code == 2
    assert (
        "error: compilation failed (" in told
        and told.count("fix: ") == 1
        and "Traceback" not in told
    )
