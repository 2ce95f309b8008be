"""Prepared text and compiled code are stored in one folder, which an environment variable sets."""

from pathlib import Path

import pytest

from run.paths import cache_folder
from tests.conftest import TINY


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/attend"),
        ({"XDG_CACHE_HOME": "/else"}, "/else/attend"),
        ({"XDG_CACHE_HOME": "/else", "ATTEND_CACHE": "~/mine"}, "home/mine"),
    ],
)
def test_the_cache_is_the_users_unless_a_variable_sets_it(
    variables, expected, tmp_path, monkeypatch
):
    for name in ("ATTEND_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == tmp_path / expected


def test_a_cache_that_cannot_be_written_is_named(command, story):
    Path(".cache").touch()  # a file, so no folder can be created
    words = ("data=text", f"data.path={story}", "data.vocab_size=400", "steps=1", "run_dir=run")
    result = command("train.py", *TINY, *words)
    assert result.code == 2 and ".cache" in result.err and not Path("run").exists()
