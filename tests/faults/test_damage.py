"""Files are loaded only if they are unchanged, and their content is never executed."""

import json
import os
import pickle
import random
import shutil
import signal
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from data.prepare import prepare
from run import checkpoint
from run.checkpoint import load_model
from run.errors import IntegrityError
from tests.conftest import tree_of
from tests.faults import harness
from tests.faults.harness import Job, forked, source


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
    other = draw.choice(
        [file for file in path.parents[1].rglob("*") if file.is_file() and file != path]
    )
    path.rename(path.with_name("aside")), other.rename(path), path.with_name("aside").rename(other)


@pytest.fixture
def spoiled(job, whole):
    """A function that returns a fresh copy of the uninterrupted run, which tests then damage."""
    job.root.mkdir()

    def renew() -> Job:
        shutil.rmtree(job.root / "run", ignore_errors=True)
        return shutil.copytree(whole.root / "run", job.root / "run") and job

    return renew


def damage(renew, ways: list, tries: int) -> list[str]:
    """Apply damage; return the cases in which a changed checkpoint was loaded anyway."""
    draw, missed = random.Random(0), []
    job = renew()
    for number in range(tries):
        path = draw.choice(
            [path for folder in job.checkpoints for path in sorted(folder.iterdir())]
        )
        before, way = path.read_bytes(), ways[number % len(ways)]
        way(path, draw)
        try:
            taken = checkpoint.newest_checkpoint(job.root / "run")
        except IntegrityError:  # both checkpoints were damaged
            taken = way is swap or None
        same = path.is_file() and path.read_bytes() == before
        if not taken or (path.parent == taken and not same):
            missed.append(f"{way.__name__} of {path.name}")
        if not same and not path.parent.exists():
            missed.append(f"{path.parent} was deleted")
        if way in (flip, cut, empty):
            path.write_bytes(before)
        else:  # other files were also damaged
            job = renew()
    return missed


def test_a_thousand_flipped_bits_are_detected(spoiled, capfd):
    assert damage(spoiled, [flip], 1000) == []
    assert "damaged file" in capfd.readouterr().err


def test_truncated_deleted_and_swapped_files_are_detected(spoiled):
    assert damage(spoiled, [cut, empty, delete, swap], 200) == []


@pytest.mark.parametrize("ways", [[flip], [swap]])
def test_disabling_verification_loads_damaged_files(spoiled, ways, monkeypatch):
    monkeypatch.setattr(
        checkpoint, "verify", checkpoint.verify
    )  # lets monkeypatch undo harness.trusting
    harness.trusting()
    assert len(damage(spoiled, ways, 20)) > 5


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


def forged_config(tree_change: dict) -> bytes:
    return json.dumps({"model": tree_of("gqa") | tree_change}).encode()


def test_nothing_in_a_checkpoint_is_executed(spoiled, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SECRET", "the-value-of-a-secret")
    canary = tmp_path / "canary"
    states = tmp_path / "state"
    torch.save({"optimizer": Canary(canary)}, states)
    forgeries = [("state.pt", states.read_bytes()), ("state.pt", pickle.dumps(Canary(canary)))]
    targets = (
        "os.system",
        "model.layers.torch.hub.load",
        "run.compose.Path.touch",
        "pathlib.Path.touch",
    )
    forgeries += [
        ("config.json", forged_config({"attention": {"_target_": target}})) for target in targets
    ]
    forgeries += [
        ("config.json", forged_config({"attention": "${oc.env:SECRET}"})),
        ("config.json", b"!!python/object/apply:os.system [touch canary]"),
        ("model.safetensors", b"x" * 99),
        ("config.json", b"[]"),
        ("config.json", forged_config({"dim": 2**20})),
    ]
    torch.save({"optimizer": {}}, states)
    forgeries.append(("state.pt", states.read_bytes()))
    # The optimizer state of a different model, and of only a part of this model.
    genuine = torch.load(spoiled().checkpoints[-1] / "state.pt")
    name, state = next(iter(genuine["optimizer"].items()))
    other_shape = {name: {"momentum": torch.zeros(3, 5)}}
    for foreign in (
        {"a": {"momentum": 1}},
        {name: state},
        genuine["optimizer"] | {name: 3},
        genuine["optimizer"] | other_shape,
    ):
        torch.save(genuine | {"optimizer": foreign}, states)
        forgeries.append(("state.pt", states.read_bytes()))
    for name, raw in forgeries:
        job = spoiled()
        for folder in job.checkpoints:
            forge(folder, name, raw)
        codes = [forked(lambda job=job: loaded(job.root / "run"))] if name != "state.pt" else []
        codes += [forked(job)] if name != "config.json" or not raw.startswith(b'{"model"') else []
        told = capfd.readouterr().err
        assert (
            set(codes) == {3} and "error: " in told and "fix: " in told and "Traceback" not in told
        ), told
        assert not canary.exists() and "the-value-of-a-secret" not in told


def loaded(run: Path) -> None:
    from run import errors

    with errors.report_errors():
        load_model(checkpoint.newest_checkpoint(run), "cpu")


@pytest.mark.parametrize("is_earlier", [False, True])
def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path, is_earlier):
    with checkpoint.atomic_directory(tmp_path / "folder") as folder:
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_bytes(name.encode())
    manifest = tmp_path / "folder" / "manifest.json"
    content = manifest.read_bytes()
    if is_earlier:  # its own hash was in the last line
        manifest.write_bytes(content + b"\n" + sha256(content + b"\n").hexdigest().encode() + b"\n")
        assert len(checkpoint.verify(tmp_path / "folder", "")) == 2
        return
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        with pytest.raises(IntegrityError):
            checkpoint.verify(tmp_path / "folder", "")


def test_a_deeply_nested_manifest_is_reported_as_damage(tmp_path):
    body = 100_000 * b"[" + b"\n"
    (tmp_path / "manifest.json").write_bytes(body)
    with pytest.raises(IntegrityError, match="recursion"):
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
            with pytest.raises(IntegrityError, match="which will be rebuilt"):
                prepare(source(story), tmp_path / "cache")
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "good", folder)
    swap(folder / "train-00000.bin", random.Random(1))
    with pytest.raises(IntegrityError, match="which will be rebuilt"):
        prepare(source(story), tmp_path / "cache")


def test_a_preparation_killed_at_any_point_leaves_no_incomplete_corpus(tmp_path, story):
    expected = prepare(source(story), tmp_path / "whole").sha256
    event, cache = 0, tmp_path / "cache"
    while True:
        event += 1
        shutil.rmtree(cache, ignore_errors=True)
        if (
            forked(lambda: prepare(source(story), cache) and None, harness.killed_at(event, cache))
            != -signal.SIGKILL
        ):
            break
        assert prepare(source(story), cache).sha256 == expected
        assert not list(cache.glob(".t*"))
    assert event > 10
