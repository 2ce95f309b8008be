"""A corpus and an uninterrupted run, created once per process."""

import pytest

from tests.conftest import settings_of
from tests.faults.harness import Job, forked


@pytest.fixture(scope="session")
def corpus(prepared):
    return prepared(settings_of("data=text", "data.path=story.txt", "data.vocab_size=400").data)


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory):
    """An uninterrupted run."""
    job = Job(corpus, tmp_path_factory.mktemp("whole"))
    assert job() == 0  # run in this process, so that its forks start with everything imported
    job.fresh()
    assert forked(job) == 0
    return job


@pytest.fixture
def job(corpus, whole, tmp_path):
    """A new run; `whole` has run in this process, so everything is imported."""
    job = Job(corpus, tmp_path / "job")
    job.fresh()
    return job
