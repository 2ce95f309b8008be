"""Files are loaded only if they are unchanged, and their content is never executed."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from data.prepare import prepare
from run import checkpoint, errors
from run.checkpoint import load_model
from run.errors import IntegrityError
from tests.conftest import tree_of
from tests.faults.harness import Job, copying, forked, source


def flip(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    files = [file for file in path.parents[1].rglob("*") if file.is_file() and file != path]
    other = draw.choice(files)
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


@pytest.fixture
def spoiled(job, whole):
    """A function that returns a fresh copy of the uninterrupted run, which tests then damage."""

    def renew() -> Job:
        shutil.rmtree(job.root / "run", ignore_errors=True)
        shutil.copytree(whole.root / "run", job.root / "run")
        return job

    return renew


@pytest.mark.parametrize("way", [flip, cut, delete, swap])
def test_a_changed_checkpoint_is_never_loaded(spoiled, way):
    draw = random.Random(0)
    for _ in range(60):
        job = spoiled()
        files = [path for folder in job.checkpoints for path in sorted(folder.iterdir())]
        path = draw.choice(files)
        before = path.read_bytes()
        way(path, draw)
        is_same = path.is_file() and path.read_bytes() == before
        try:
            assert checkpoint.newest_checkpoint(job.root / "run") != path.parent or is_same, path
        except IntegrityError:
            assert way is swap, path  # which may damage both checkpoints
        assert path.parent.exists(), path


def test_a_damaged_checkpoint_is_skipped_and_kept(spoiled, whole, capfd):
    job = spoiled()
    newest = job.checkpoints[-1]
    flip(newest / "state.pt", random.Random(0))
    raw = (newest / "state.pt").read_bytes()
    assert forked(job) == 0
    assert "skipping a damaged checkpoint: damaged file" in capfd.readouterr().err
    (aside,) = (job.root / "run" / "checkpoints").glob("damaged-*")
    assert (aside / "state.pt").read_bytes() == raw and job.curve() == whole.curve()


def forge(folder: Path, name: str, raw: bytes) -> None:
    """Put a file into a checkpoint and write a matching manifest, as an attacker could."""
    about = checkpoint.verify(folder, "")
    rest = {other: (folder / other).read_bytes() for other in about} | {name: raw}
    shutil.rmtree(folder)
    with checkpoint.atomic_directory(folder) as staging:
        for other, content in rest.items():
            (staging / other).write_bytes(content)


class Canary:
    """Creates a file if unpickling executes it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_file_of_a_model_is_executed(spoiled, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SECRET", "the-value-of-a-secret")
    monkeypatch.chdir(tmp_path)
    configs = [b"[]", b"!!python/object/apply:os.system [touch canary]"]
    changes = [{"dim": 2**20}, {"attention": "${oc.env:SECRET}"}]
    for target in ("os.system", "model.layers.torch.hub.load", "run.compose.Path.touch"):
        changes.append({"attention": {"_target_": target}})
    for change in changes:
        configs.append(json.dumps({"model": tree_of("gqa") | change}).encode())
    forgeries = [("model.safetensors", 99 * b"x")]
    forgeries += [("config.json", config) for config in configs]
    for name, content in forgeries:
        newest = spoiled().checkpoints[-1]
        forge(newest, name, content)
        with pytest.raises(SystemExit) as ended, errors.report_errors():
            load_model(newest, "cpu")
        (line,) = capfd.readouterr().err.splitlines()
        assert ended.value.code == 3 and line.startswith("error: ")
        assert "the-value-of-a-secret" not in line
        assert not (tmp_path / "canary").exists()


def test_no_training_state_is_executed_or_loaded_into_another_model(spoiled, tmp_path, capfd):
    canary = tmp_path / "canary"
    genuine = torch.load(spoiled().checkpoints[-1] / "state.pt")
    name, values = next(iter(genuine["optimizer"].items()))
    optimizers = [
        Canary(canary),
        {"a": {"momentum": 1}},
        {name: values},  # only a part of the model
        genuine["optimizer"] | {name: 3},
        genuine["optimizer"] | {name: {"momentum": torch.zeros(3, 5)}},
    ]
    states = [{"optimizer": {}}]
    states += [genuine | {"optimizer": optimizer} for optimizer in optimizers]
    forgeries = [pickle.dumps(Canary(canary))]
    for state in states:
        torch.save(state, tmp_path / "state")
        forgeries.append((tmp_path / "state").read_bytes())
    for forgery in forgeries:
        job = spoiled()
        for folder in job.checkpoints:
            forge(folder, "state.pt", forgery)
        assert forked(job) == 3
        *_, line = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ") and "state.pt" in line
        assert not canary.exists()


def test_a_manifest_of_an_earlier_version_is_read(spoiled):
    """Its last line was its own hash."""
    newest = spoiled().checkpoints[-1]
    with (newest / "manifest.json").open("a", encoding="utf-8") as file:
        file.write(f"\n{64 * '0'}\n")
    assert checkpoint.newest_checkpoint(newest.parents[1]) == newest


def test_a_damaged_corpus_is_refused(tmp_path, story):
    draw = random.Random(0)
    prepare(source(story), tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    shutil.copytree(folder, tmp_path / "good")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "tokenizer.model", "train-00000.bin", "validation-00000.bin"]
    for way in (flip, cut, delete):
        for name in names:
            way(folder / name, draw)
            with pytest.raises(IntegrityError):
                prepare(source(story), tmp_path / "cache")
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "good", folder)
    swap(folder / "train-00000.bin", random.Random(1))
    with pytest.raises(IntegrityError):
        prepare(source(story), tmp_path / "cache")


def test_a_preparation_killed_at_any_point_leaves_no_incomplete_corpus(tmp_path, story):
    expected = prepare(source(story), tmp_path / "whole").sha256
    cache = tmp_path / "cache"
    cache.mkdir()
    copies = tmp_path / "copies"
    assert forked(lambda: prepare(source(story), cache) and None, copying(cache, copies)) == 0
    points = sorted(copies.iterdir())
    assert len(points) > 10
    for cache in points:
        assert prepare(source(story), cache).sha256 == expected
        assert not list(cache.glob(".t*"))
