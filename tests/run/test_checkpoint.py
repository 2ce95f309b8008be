"""What a checkpoint gives back, and what never becomes one."""

import math

import pytest

from run import checkpoint, errors
from run.errors import IntegrityError
from run.instantiate import instantiate
from tests.conftest import settings_of


def test_a_state_without_a_key_is_refused_by_its_name(trainer_of, capsys):
    """With exit code 3, and not as if it could not be read."""
    first = trainer_of(run="cut")
    first.train_step()
    state = first.state()
    del state["seconds"], state["loss_sum"]
    first.state = lambda: state
    first.save()
    second = trainer_of("resume=true", run="cut")
    with pytest.raises(SystemExit) as end, errors.report_errors():
        second.restore_or_start(None)
    told = capsys.readouterr().err
    assert end.value.code == 3 and told.count("\n") == 1, told
    assert "state.pt: 'loss_sum'" in told or "state.pt: 'seconds'" in told


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


def test_weights_of_another_shape_are_refused(trainer_of):
    trainer = trainer_of()
    trainer.train_step()
    trainer.save()
    other = instantiate(settings_of("model=tiny", "model.depth=3", "data.vocab_size=400").model)
    with pytest.raises(IntegrityError, match="not the model's weights"):
        checkpoint.load_weights(other, checkpoint.newest_checkpoint(trainer.run_dir))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_no_disk(trainer_of, optimizer, value, capsys):
    trainer = trainer_of(f"optimizer={optimizer}")
    trainer.train_step()
    forward = trainer.parallel
    trainer.parallel = lambda *batch: [value * result for result in forward(*batch)]
    trainer.train_step()
    trainer.parallel = forward
    trainer.train_step()
    for action in (trainer.report, trainer.save):
        with pytest.raises(SystemExit) as end:
            action()
        assert end.value.code == 4
        assert "training diverged (by step 3)" in capsys.readouterr().err
    assert not [*trainer.run_dir.glob("checkpoints/*")]
