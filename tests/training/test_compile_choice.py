"""compile=auto compiles where that gives more steps, by made-up times."""

import math

import pytest
import torch

from run import compilation
from tests.conftest import close
from training.compile_choice import TIMED_STEPS, CompileRecord
from training.trainer import Trainer

CPU = torch.device("cpu")
# Seconds: to compile, to compile again, of an eager step, of a compiled one.
MACHINES = {"two cores": (66, 13, 0.3, 0.157), "two slow cores": (80, 20, 0.9, 0.5)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "USER_CACHE", str(tmp_path))
    return tmp_path


def record_of(shape: str = "default") -> CompileRecord:
    return CompileRecord([shape], compilation.expected_seconds(5, CPU))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("minutes", [1, 3, 5, 20])
@pytest.mark.parametrize("runs_before", [0, 1, 2])
def test_a_run_has_nearly_the_steps_of_the_better_choice(machine, minutes, runs_before):
    cold, cached, eager, compiled = MACHINES[machine]
    if runs_before > 0:
        record_of().add(cold, compiled, 0.0)  # with compile=true
    if runs_before > 1:
        record_of().add(cached, compiled, eager)
    compiling = cached if runs_before else cold
    seconds = 60 * minutes - 4
    best = max(seconds / eager, (seconds - compiling) / compiled)

    seconds -= TIMED_STEPS * eager
    steps = seconds / eager
    if record_of().pays(seconds):
        steps = (seconds - compiling) / compiled
    assert TIMED_STEPS + steps > 0.95 * best


def test_what_was_measured_is_found_again_for_its_shape_alone():
    record_of().add(66.0, 0.2, 0.5)
    assert (record_of().seconds, record_of().step_ratio) == (66.0 * 0.25, 0.5)
    record_of().add(13.0, 0.2, 0.0)
    assert (record_of().seconds, record_of().step_ratio) == (13.0, 0.5)
    assert (record_of("another").seconds, record_of("another").step_ratio) == (60.0, 0.6)


@pytest.mark.parametrize("text", ["", "[1", "{}", "[1]"])
def test_a_file_that_is_damaged_is_as_none(text):
    record = record_of()
    record.add(1.0, 0.2, 0.5)
    record.path.write_text(text)
    assert record_of().seconds == 60.0


def test_a_record_does_not_stand_for_a_compiler():
    record_of().add(60.0, 0.1, 0.2)
    assert not CompileRecord(["default"], math.inf).pays(600.0)


@pytest.mark.parametrize(
    "words, compiles",
    [
        (("steps=40",), False),
        (("steps=4000",), True),
        (("steps=4000", "max_minutes=1"), False),
        (("steps=null", "max_epochs=null", "max_minutes=10"), True),
        (("steps=4000", "compile=false"), False),
    ],
)
def test_a_choice_is_made_once_by_the_steps_and_minutes_left(
    trainer_of, monkeypatch, capsys, words, compiles
):
    monkeypatch.setattr(compilation, "missing_for_compilation", lambda device: None)
    trainer = trainer_of("compile=auto", *words)
    clock = [trainer.started]
    monkeypatch.setattr("training.trainer.monotonic", lambda: clock[0])
    compiled_at = []
    monkeypatch.setattr(Trainer, "compile_first_step", lambda self: compiled_at.append(self.step))
    for _ in range(12):
        trainer.step_start = trainer._clock()
        trainer.step += 1
        clock[0] += 5.0 if trainer.step == 1 else 0.5
        trainer.choose_compilation()
    assert compiled_at == ([TIMED_STEPS] if compiles else [])
    told = capsys.readouterr().err
    choice = "compiling (compile=auto)" if compiles else "not compiling (compile=auto)"
    assert told.count("compile=auto") == ("compile=false" not in words)
    assert "compile=false" in words or (choice in told and "from 0.50 s to about 0.30 s" in told)


@pytest.mark.skipif(compilation.missing_for_compilation(CPU) is not None, reason="needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_run_compiles_after_its_first_steps(trainer_of, monkeypatch):
    """With torch's own backend for tests, which leaves the compiler out."""
    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: compile_with(self, backend="eager")
    )
    monkeypatch.setattr(compilation, "use_cache", lambda: None)
    monkeypatch.setattr(CompileRecord, "pays", lambda *_: True)
    eager, trainer = trainer_of("steps=8"), trainer_of("compile=auto", "steps=8")
    for step in range(8):
        assert trainer.is_compiled == (step >= TIMED_STEPS)
        for each in (eager, trainer):
            each.train_step()
            each.choose_compilation()
    close(trainer.loss_sum, eager.loss_sum, rtol=1e-3, atol=0)
    assert trainer.saved_config()["machine"]["compiled"] and not eager.is_compiled
    assert not trainer.compile_record.path.exists()
    trainer.log_metrics()
    assert trainer.compile_record.path.exists() and trainer.compile_record.step_ratio != 0.6
