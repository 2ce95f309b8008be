"""Loading and retention of checkpoints, and states that must never be saved."""

import errno
import math
import re
from pathlib import Path
from shutil import copytree
from unittest.mock import Mock

import pytest

from run import checkpoint
from run.errors import IntegrityError
from run.instantiate import instantiate
from tests.conftest import saved, tree_of
from train import take_step


@pytest.mark.parametrize(("key", "file"), [("loss_sum", "state.pt"), ("machine", "config.json")])
def test_a_key_missing_from_a_checkpoint_is_reported(run_of, monkeypatch, key, file):
    save = checkpoint.save

    def save_without_key(run_dir, step, weights, config, tokenizer, state) -> Path:
        config.pop(key, None)
        state.pop(key, None)
        return save(run_dir, step, weights, config, tokenizer, state)

    monkeypatch.setattr(checkpoint, "save", save_without_key)
    first = run_of(folder="cut")
    take_step(first)
    first.checkpointer.save(first.progress)
    with pytest.raises(IntegrityError, match=rf"{re.escape(file)}.*{key}"):
        run_of("resume=true", folder="cut")


def test_a_bug_is_not_reported_as_damage(run_of, monkeypatch):
    run = run_of()
    take_step(run)
    run.checkpointer.save(run.progress)
    attend = "model.attention.softmax.SoftmaxAttention.attend"
    monkeypatch.setattr(attend, Mock(side_effect=TypeError))
    with pytest.raises(TypeError):
        checkpoint.load_model(checkpoint.newest_checkpoint(run.env.run_dir), "cpu")


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


def test_a_loss_that_was_not_finite_is_never_saved(run_of):
    run = run_of()
    forward = run.trainer.parallel

    def spoiled(*batch) -> tuple:
        objective, metrics = forward(*batch)
        return math.nan * objective, {name: math.nan * x for name, x in metrics.items()}

    run.trainer.parallel = spoiled
    take_step(run)
    run.trainer.parallel = forward
    take_step(run)
    for action in (run.meter.report, run.checkpointer.save):
        with pytest.raises(SystemExit) as end:
            action(run.progress)
        assert end.value.code == 4
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


def test_a_folder_takes_precedence_over_a_run_of_the_same_name(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/NAME", "NAME"):
        saved(Path(folder), tree_of("gqa", "model.depth=1"), tokenizer)
        assert checkpoint.find_model("NAME").parent.parent == Path(folder)
