"""Files are loaded only if they are unchanged, and their content is never executed."""

import json
import os
import pickle
import random
import shutil
from hashlib import sha256
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


def empty(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


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
    job.root.mkdir()

    def renew() -> Job:
        shutil.rmtree(job.root / "run", ignore_errors=True)
        shutil.copytree(whole.root / "run", job.root / "run")
        return job

    return renew


@pytest.mark.parametrize(
    ("ways", "tries"), [([flip], 400), ([cut, empty, delete, swap], 100)], ids=["bits", "files"]
)
def test_a_changed_checkpoint_is_never_loaded(spoiled, ways, tries):
    draw = random.Random(0)
    job = spoiled()
    for number in range(tries):
        files = [path for folder in job.checkpoints for path in sorted(folder.iterdir())]
        path = draw.choice(files)
        before = path.read_bytes()
        way = ways[number % len(ways)]
        way(path, draw)
        damage = f"{way.__name__} of {path}"
        is_same = path.is_file() and path.read_bytes() == before
        try:
            assert checkpoint.newest_checkpoint(job.root / "run") != path.parent or is_same, damage
        except IntegrityError:
            assert way is swap, damage  # which may damage both checkpoints
        assert path.parent.exists(), damage
        if way in (flip, cut, empty):
            path.write_bytes(before)
        else:  # other files were also damaged
            job = spoiled()


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


@pytest.fixture
def manifest(tmp_path) -> Path:
    with checkpoint.atomic_directory(tmp_path / "folder") as folder:
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_bytes(name.encode())
    return tmp_path / "folder" / "manifest.json"


def test_every_flipped_bit_of_a_manifest_is_detected(manifest):
    content = manifest.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        with pytest.raises(IntegrityError):
            checkpoint.verify(manifest.parent, "")


def test_a_manifest_of_an_earlier_version_is_read(manifest):
    """Its last line was its own hash."""
    content = manifest.read_bytes() + b"\n"
    manifest.write_bytes(content + sha256(content).hexdigest().encode() + b"\n")
    assert len(checkpoint.verify(manifest.parent, "")) == 2


def test_a_deeply_nested_manifest_is_reported_as_damage(tmp_path):
    body = 100_000 * b"[" + b"\n"
    (tmp_path / "manifest.json").write_bytes(body)
    with pytest.raises(IntegrityError):
        checkpoint.verify(tmp_path, "none")


def test_a_damaged_corpus_is_refused(tmp_path, story):
    draw = random.Random(0)
    prepare(source(story), tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    shutil.copytree(folder, tmp_path / "good")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "tokenizer.model", "train-00000.bin", "validation-00000.bin"]
    for way in (flip, cut, empty, delete):
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
