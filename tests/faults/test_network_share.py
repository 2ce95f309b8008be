"""Runs are saved reliably on a file system that can neither sync folders nor lock files."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from run import progress, sealed
from tests.conftest import LONG, ROOT, TINY
from tests.faults.harness import finish, start

NO_SYNC = (
    "warning: folders cannot be synced here (Invalid argument): a power cut may lose the newest"
)
NO_LOCK = "does not support locks: do not start two runs in the same folder"


@pytest.fixture(scope="module")
def preload(tmp_path_factory) -> dict[str, str]:
    """Environment variables that make all file systems refuse to sync folders and lock files."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and Linux, whose loader reads LD_PRELOAD")
    library = tmp_path_factory.mktemp("preload") / "network_share.so"
    code = Path(__file__).with_name("network_share.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code, "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library)}


def python(preload: dict[str, str], *words: str, cwd: Path) -> subprocess.CompletedProcess:
    how = {"cwd": cwd, "env": preload, "capture_output": True, "timeout": LONG}
    return subprocess.run([sys.executable, *words], **how, encoding="utf-8")


def test_a_run_is_saved_and_resumed_with_one_warning_of_each_kind(preload, story):
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    words = (str(ROOT / "train.py"), *TINY, *text, "save_every=1", "eval_every=9", "run_dir=run")
    for more in (("steps=2",), ("steps=3", "resume=true")):
        done = python(preload, *words, *more, cwd=story.parent)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(NO_SYNC) == done.stderr.count(NO_LOCK) == 1
        assert done.stderr.count("warning: ") == 2
    assert "resuming step 2" in done.stderr
    folders = sorted(path.name for path in (story.parent / "run" / "checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000003"]


def test_a_run_on_a_network_share_resumes_from_every_crash_point(preload):
    """Runs the test of all crash points in a process that preloads the library."""
    test = "tests/faults/test_crashes.py::test_a_run_resumes_from_every_crash_point"
    # Check inside the process that the library is loaded.
    check = "import os, sys, pytest\ntry: os.fsync(os.open('/', 0))\nexcept OSError: pass\n"
    check += "else: sys.exit('the library is not loaded')\nsys.exit(pytest.main(sys.argv[1:]))"
    words = ("-q", "-n", "0", "-p", "no:cacheprovider", test)
    done = python(preload, "-c", check, *words, cwd=ROOT)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


PREPARE = """
import sys
from pathlib import Path
from data.prepare import prepare
from tests.faults.harness import source
print(prepare(source(Path(sys.argv[1])), Path(sys.argv[2])).sha256)
"""


def test_two_processes_can_prepare_the_same_text_concurrently(preload, story, tmp_path):
    cache = tmp_path / "cache"
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    words = [sys.executable, "-c", PREPARE, str(story), str(cache)]
    together = [subprocess.Popen(words, env=preload, **how) for _ in range(2)]
    said = [process.communicate(timeout=LONG) for process in together]
    assert [process.returncode for process in together] == [0, 0], said
    assert len({out for out, _ in said}) == 1
    (corpus,) = [path for path in cache.iterdir() if path.name != ".lock"]
    sealed.verify(corpus, "")


@pytest.fixture
def failing_sync(monkeypatch):
    """A function that makes fsync fail for files or for folders."""
    progress.warn_once.cache_clear()
    fsync = os.fsync

    def fail(number: int, is_folder: bool) -> None:
        def failing(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}") == is_folder:
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing)

    yield fail
    progress.warn_once.cache_clear()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
def test_a_folder_that_cannot_be_synced_causes_one_warning(tmp_path, failing_sync, capfd, number):
    failing_sync(number, is_folder=True)
    for name in ("a", "b"):
        with sealed.atomic_directory(tmp_path / name) as staging:
            (staging / "file").write_bytes(b"x")
        sealed.verify(tmp_path / name, "")
    assert capfd.readouterr().err.count("warning: ") == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_disk_error_during_a_sync_ends_the_run(job, failing_sync, capfd, number, is_folder):
    job.fresh()
    assert finish(start(job.with_words("steps=1"), lambda: failing_sync(number, is_folder))) == 74
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {os.strerror(number)} ({job.root}/run/checkpoints")
    assert not job.checkpoints
