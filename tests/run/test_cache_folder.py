"""Prepared text and compiled code are stored in a folder that the user can write to."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from data.prepare import prepare
from run import cache_folder, compilation, sealed
from run.cache_folder import compiler_cache, writable_cache
from tests.conftest import TINY
from tests.faults.harness import source

# Not even root can create a folder below a file.
NOWHERE = Path("/dev/null/clone/.cache")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Set a home folder and a folder for temporary files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_folder.temporary_cache.cache_clear()
    yield tmp_path / "home"
    cache_folder.temporary_cache.cache_clear()


def test_the_cache_is_in_the_clone_if_it_is_writable(tmp_path):
    assert writable_cache(tmp_path / ".cache") == tmp_path / ".cache"
    assert writable_cache(Path(".cache")) == Path(".cache")
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("setting", [None, "elsewhere", "not/absolute"])
def test_the_cache_falls_back_to_the_users_home(home, monkeypatch, setting):
    expected = home / ".cache"
    if setting == "elsewhere":
        expected = home.parent / setting
        monkeypatch.setenv("XDG_CACHE_HOME", str(expected))
    elif setting is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
    assert writable_cache(NOWHERE) == compiler_cache(NOWHERE) == expected / "attend"


def test_a_cache_folder_of_another_user_is_not_used(tmp_path, home, monkeypatch):
    clone = tmp_path / ".cache"
    clone.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != clone and access(path, mode))
    assert writable_cache(clone) == home / ".cache" / "attend"


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_cache_is_in_a_private_temporary_folder_if_there_is_no_home(
    tmp_path, monkeypatch, capfd, is_taken
):
    monkeypatch.setenv("HOME", "/dev/null")
    usual = tmp_path / f"attend-{os.getuid()}"
    if is_taken:  # by a different user, who could replace its files
        (tmp_path / "theirs").mkdir()
        usual.symlink_to(tmp_path / "theirs")
    folder = writable_cache(NOWHERE)
    assert folder == compiler_cache(NOWHERE) and folder.parent == tmp_path
    assert (folder == usual) != is_taken
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: the cache is in {folder}, which may be deleted: ")
    assert line.endswith(". fix: set XDG_CACHE_HOME to the absolute path of a folder")


@pytest.mark.parametrize("name", ["My Projects", "it's", 'a "clone"', "back\\slash", "a\ttab"])
def test_the_compiler_cache_avoids_paths_that_need_quoting(tmp_path, home, name):
    clone = tmp_path / name / ".cache"
    assert compiler_cache(clone) == home / ".cache" / "attend"
    assert writable_cache(clone) == clone


def test_compiled_code_can_be_cached_in_a_path_with_other_unusual_characters(tmp_path):
    # Tested manually: torch.compile works in such a path.
    clone = tmp_path / "красный(x){y}$z&;%s#" / ".cache"
    assert compiler_cache(clone) == clone


def test_a_corpus_is_read_from_a_read_only_cache(tmp_path, story, monkeypatch):
    built = prepare(source(story), tmp_path / ".cache")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    read = prepare(source(story), tmp_path / ".cache")
    assert read.sha256 == built.sha256 and Path(read.validation.filename).is_relative_to(tmp_path)
    assert [path.name for path in tmp_path.glob("attend-*")] == []


def test_text_is_prepared_in_the_home_cache_if_a_local_one_cannot_be_created(command, story, home):
    Path(".cache").touch()  # a file, so no folder can be created
    words = ("data=text", f"data.path={story}", "data.vocab_size=400", "steps=1", "run_dir=run")
    command("train.py", *TINY, *words).succeeded()
    (corpus,) = (home / ".cache" / "attend").glob("text-*")
    assert (corpus / "manifest.json").exists()


def test_compiled_code_is_stored_on_a_file_system_that_supports_locks(
    tmp_path, home, monkeypatch, capfd
):
    """The reason is that torch.compile locks files in its cache."""
    share = tmp_path / "share" / "compiled-2.13"

    def acquire(lock):
        return share not in Path(lock.lock_file).parents and sealed.acquire(lock)

    monkeypatch.setattr(cache_folder, "acquire", acquire)
    elsewhere = tmp_path / f"attend-{os.getuid()}"
    user = home / ".cache" / "attend"
    nobody = Path("/dev/null")  # a user without a home folder
    places = (
        (home / "compiled-2.13", home, home),
        (share, home, user),
        (NOWHERE / "compiled-2.13", home, user),
        (share, nobody, elsewhere),
        (NOWHERE / "compiled-2.13", nobody, elsewhere),
    )
    for cache, home_folder, expected in places:
        monkeypatch.setenv("HOME", str(home_folder))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        compilation.prepare_to_compile()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected / "compiled-2.13")
    assert capfd.readouterr().err.count("warning: the cache is ") == 1
