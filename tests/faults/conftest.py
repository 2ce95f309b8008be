"""A corpus and a run that went well, once for all tests of a process."""

import pytest

from tests.conftest import settings_of
from tests.faults.harness import Job, forked


@pytest.fixture(scope="session")
def corpus(prepared):
    return prepared(settings_of("data=text", "data.path=story.txt", "data.vocab_size=400").data)


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
