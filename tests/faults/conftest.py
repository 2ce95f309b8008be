"""A corpus and a run that went well, once for all tests of a process."""

import pytest

from data.prepare import prepare
from run.instantiate import instantiate
from tests.conftest import settings_of, tell
from tests.faults.harness import Job, forked


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    settings = settings_of("data=text", f"data.path={tell(folder)}", "data.vocab_size=400")
    return prepare(instantiate(settings.data, "data"), folder / "cache")


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory):
    """A run that nothing happened to."""
    job = Job(corpus, tmp_path_factory.mktemp("whole"))
    assert job() == 0  # in this process: those that are forked from it start warm
    job.fresh()
    assert forked(job) == 0
    return job


@pytest.fixture
def job(corpus, whole, tmp_path):
    """In a process that is warm by now."""
    return Job(corpus, tmp_path / "job")
