"""Loading and retention of checkpoints, and states that must never be saved."""

import errno
import math
from pathlib import Path
from shutil import copytree
from unittest.mock import Mock
from zipfile import ZipFile

import pytest

from run import checkpoint, errors
from run.checkpoint import load_model
from run.errors import IntegrityError
from run.instantiate import instantiate
from tests.conftest import saved, tree_of
from train import take_step


@pytest.mark.parametrize(("key", "file"), [("loss_sum", "state.pt"), ("machine", "config.json")])
def test_a_key_missing_from_a_checkpoint_is_reported(run_of, capsys, monkeypatch, key, file):
    """The exit code is 3, and the message does not call the file unreadable."""
    save = checkpoint.save

    def save_without_key(run_dir, step, weights, config, tokenizer, state) -> Path:
        config.pop(key, None)
        state.pop(key, None)
        return save(run_dir, step, weights, config, tokenizer, state)

    monkeypatch.setattr(checkpoint, "save", save_without_key)
    first = run_of(folder="cut")
    take_step(first)
    first.checkpointer.save(first.progress)
    with pytest.raises(SystemExit) as end, errors.report_errors():
        run_of("resume=true", folder="cut")
    told = capsys.readouterr().err
    assert end.value.code == 3 and told.count("error: ") == 1, told
    assert file in told and key in told


@pytest.mark.parametrize(
    ("broken", "bug"),
    [
        ("model.attention.softmax.SoftmaxAttention.attend", TypeError),
        ("training.meter.Meter.restore", TypeError),
    ],
)
def test_a_bug_is_not_reported_as_damage(run_of, monkeypatch, broken, bug):
    first = run_of(folder="cut")
    take_step(first)
    first.checkpointer.save(first.progress)
    monkeypatch.setattr(broken, Mock(side_effect=bug))
    with pytest.raises(bug):
        load_model(checkpoint.newest_checkpoint(first.env.run_dir), "cpu")
        run_of("resume=true", folder="cut")


def test_two_checkpoints_are_kept_and_the_newest_intact_one_is_loaded(run_of, capsys):
    run = run_of()
    folder = run.env.run_dir / "checkpoints"
    older = folder / "step-00000002"
    newest = folder / "step-00000003"
    for copied in (False, True, False):
        take_step(run)
        run.checkpointer.save(run.progress)
        if copied:
            copytree(older, folder / "step-00000002.bak")  # a copy is not a checkpoint of the run
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000002", "step-00000002.bak", "step-00000003"]
    assert checkpoint.newest_checkpoint(run.env.run_dir) == newest
    (newest / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint.newest_checkpoint(run.env.run_dir) == older
    assert "skipping" in capsys.readouterr().err
    older.rename(folder / "step-00000009")
    with pytest.raises(IntegrityError):
        checkpoint.newest_checkpoint(run.env.run_dir)
    assert len([*folder.iterdir()]) == 3  # damaged ones are not deleted


def test_a_disconnected_network_disk_is_not_reported_as_damage(run_of, monkeypatch):
    run = run_of()
    take_step(run)
    run.checkpointer.save(run.progress)
    disconnected = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(checkpoint, "sha256_of", Mock(side_effect=disconnected))
    with pytest.raises(OSError, match="Stale"):
        checkpoint.newest_checkpoint(run.env.run_dir)


@pytest.mark.parametrize("depth", [1, 3])
def test_missing_and_surplus_weights_are_refused(run_of, depth):
    run = run_of()  # of two layers
    take_step(run)
    run.checkpointer.save(run.progress)
    tree = run.env.settings.model | {"depth": depth}
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        checkpoint.load_weights(instantiate(tree), checkpoint.newest_checkpoint(run.env.run_dir))


@pytest.mark.parametrize(("optimizer", "value"), [("muon", math.nan), ("adamw", math.inf)])
def test_non_finite_values_are_never_saved(run_of, optimizer, value, capsys):
    run = run_of(f"optimizer={optimizer}")
    take_step(run)
    forward = run.trainer.parallel

    def spoiled(*batch) -> tuple:
        objective, metrics = forward(*batch)
        return value * objective, {name: value * x for name, x in metrics.items()}

    run.trainer.parallel = spoiled
    take_step(run)
    run.trainer.parallel = forward
    take_step(run)
    for action in (run.meter.report, run.checkpointer.save):
        with pytest.raises(SystemExit) as end:
            action(run.progress)
        assert end.value.code == 4
        problem = capsys.readouterr().err
        assert "step 3" in problem
        assert "resume=true" not in problem  # there is no checkpoint
    assert not [*run.env.run_dir.glob("checkpoints/*")]


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_values_that_an_update_made_non_finite_are_never_saved(run_of, part):
    run = run_of()
    take_step(run)
    tensors = [*run.trainer.model.parameters()]
    if part == "optimizer":
        tensors = [values["momentum"] for values in run.trainer.optimizers[0].state.values()]
    tensors[0].detach().fill_(math.inf)
    with pytest.raises(SystemExit) as end:
        run.checkpointer.save(run.progress)
    assert end.value.code == 4
    assert not [*run.env.run_dir.glob("checkpoints/*")]


# An empty pickle, and pickles whose storage id is a number or names a class that is not a storage.
PICKLES = (
    b"",
    b"\x80\x02K\x01Q.",
    b"\x80\x02(X\x07\0\0\0storageccollections\nOrderedDict\nX\x01\0\0\0aX\x03\0\0\0cpuK\x01tQ.",
)


@pytest.mark.parametrize("pickled", PICKLES)
def test_a_hostile_pickle_is_reported_as_damage(tmp_path, pickled):
    with ZipFile(tmp_path / "state.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(IntegrityError, match=r"state\.pt"):
        checkpoint.load_state(tmp_path, ["step"])


def test_a_model_is_found_without_reading_the_training_state(tmp_path, tokenizer):
    saved(tmp_path / "run", tree_of("gqa", "model.depth=1"), tokenizer)
    path = checkpoint.find_model(tmp_path / "run")
    (path / "state.pt").write_bytes(b"damaged")
    assert checkpoint.find_model(tmp_path / "run") == checkpoint.find_model(path) == path
    with pytest.raises(IntegrityError):
        checkpoint.newest_checkpoint(tmp_path / "run")
    (path / "model.safetensors").write_bytes(b"damaged")
    for where in (tmp_path / "run", path):
        with pytest.raises(IntegrityError):
            checkpoint.find_model(where)
