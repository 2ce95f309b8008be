"""What a checkpoint gives back, and what never becomes one."""

import json
import math
import os
import resource

import pytest
import torch

from run import checkpoint, errors
from run.errors import IntegrityError
from run.instantiate import instantiate
from tests.conftest import settings_of, weights


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_resumed_run_continues_bit_for_bit(trainer_of, optimizer):
    whole = trainer_of(f"optimizer={optimizer}")
    for _ in range(6):
        whole.train_step()
        whole.log_metrics()
    first = trainer_of(f"optimizer={optimizer}", run="cut")
    for _ in range(3):
        first.train_step()
        first.log_metrics()
    first.save()
    first.train_step()
    first.log_metrics()  # work that is lost, its line of metrics too
    second = trainer_of(f"optimizer={optimizer}", "resume=true", run="cut")
    second.restore_or_start(None)
    second.log.open(second.log_state)
    assert second.step == 3
    for _ in range(3):
        second.train_step()
        second.log_metrics()
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(whole).values(), weights(second).values(), strict=True)
    )
    lines = [
        [json.loads(line) for line in (t.run_dir / "metrics.jsonl").read_text().splitlines()]
        for t in (whole, second)
    ]
    assert [line["step"] for line in lines[1]] == [1, 2, 3, 4, 5, 6]
    assert [line["train_loss"] for line in lines[0]] == [line["train_loss"] for line in lines[1]]


def test_a_checkpoint_of_an_earlier_version_is_resumed(trainer_of, monkeypatch):
    """It has a list of pending work, and a hash beside the size of each file of the log."""
    first = trainer_of(run="cut")
    first.train_step()
    first.log_metrics()
    sizes = {name: (size, "hash") for name, size in first.log.sizes.items()}
    old = first.state() | {"pending": ["eval"], "log": {**sizes, "wandb": None}}
    monkeypatch.setattr(first, "state", lambda: old)
    first.save()
    first.log.append("metrics.jsonl", "later")
    second = trainer_of("resume=true", run="cut")
    second.restore_or_start(None)
    second.log.open(second.log_state)
    assert second.step == 1
    (line,) = (second.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1


def test_a_state_without_a_key_is_refused_by_its_name(trainer_of, capsys):
    """With exit code 3, and not as if it could not be read."""
    first = trainer_of(run="cut")
    first.train_step()
    state = first.state()
    del state["seconds"], state["nats"]
    first.state = lambda: state
    first.save()
    second = trainer_of("resume=true", run="cut")
    with pytest.raises(SystemExit) as end, errors.report_errors():
        second.restore_or_start(None)
    told = capsys.readouterr().err
    assert end.value.code == 3 and told.count("\n") == 1, told
    assert "a key is missing" in told and "state.pt has no nats, seconds). fix: " in told


def test_two_checkpoints_are_kept_and_the_newest_whole_one_is_taken(trainer_of, capsys):
    trainer = trainer_of()
    for _ in range(3):
        trainer.train_step()
        trainer.save()
    folders = sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000003"]
    newest = trainer.run_dir / "checkpoints" / folders[1]
    assert checkpoint.newest_checkpoint(trainer.run_dir) == newest
    raw = bytearray((newest / "model.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(raw)
    assert checkpoint.newest_checkpoint(trainer.run_dir).name == folders[0]
    assert "skipped" in capsys.readouterr().err
    (trainer.run_dir / "checkpoints" / folders[0] / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match="no checkpoint is whole"):
        checkpoint.newest_checkpoint(trainer.run_dir)
    assert (
        len([*(trainer.run_dir / "checkpoints").iterdir()]) == 2
    )  # what is damaged is not deleted


def test_a_full_disk_leaves_the_last_checkpoint(trainer_of):
    trainer = trainer_of()
    trainer.train_step()
    trainer.save()
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 4096, 200_000):
        trainer.step += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, largest[1]))
        try:
            with pytest.raises(SystemExit, match="74"):
                trainer.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, largest)
        assert os.listdir(trainer.run_dir / "checkpoints") == ["step-00000001"]
    assert checkpoint.newest_checkpoint(trainer.run_dir) is not None


def test_weights_of_another_shape_are_refused(trainer_of):
    trainer = trainer_of()
    trainer.train_step()
    trainer.save()
    other = instantiate(settings_of("model=tiny", "model.depth=3", "data.vocab_size=400")["model"])
    with pytest.raises(IntegrityError, match="not the model's weights"):
        checkpoint.load_weights(other, checkpoint.newest_checkpoint(trainer.run_dir))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_neither_weights_nor_disk(trainer_of, optimizer, value, capsys):
    trainer = trainer_of(f"optimizer={optimizer}")
    trainer.train_step()
    before, forward = weights(trainer), trainer.parallel
    trainer.parallel = lambda *batch: [value * result for result in forward(*batch)]
    trainer.train_step()
    trainer.parallel = forward
    trainer.train_step()
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    assert all(value.isfinite().all() for state in states for value in state.values())
    for action in (trainer.log_metrics, trainer.save):
        with pytest.raises(SystemExit) as end:
            action()
        assert end.value.code == 4
        assert (
            "at step 2, whose batch is 8 rows of epoch 0, from the tokens"
            in capsys.readouterr().err
        )
    assert not [*trainer.run_dir.glob("checkpoints/*")]
