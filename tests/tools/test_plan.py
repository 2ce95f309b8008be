"""Jobs are planned from settings that are composed once for all seeds of a variant."""

from pathlib import Path

from tools.compare import plan


def test_settings_of_a_job_are_those_that_its_overrides_compose_to():
    words = ["attention=gqa,mqa", "seed=0,3", "model=tiny", "optimizer.lr=0.01", "steps=9"]
    words += ["tasks=text,recall", "recall.data.pairs=[2,4]", "recall.eval_tokens=500"]
    tasks = plan.plan_jobs(words, "params", Path("out, of é"))
    jobs = [*tasks["text"], *tasks["recall"]]
    assert [job.settings["seed"] for job in jobs] == [0, 0, 3, 3] * 2
    for job in jobs:
        assert plan.compose_settings(job.overrides) == job.settings
    hidden = [job.settings["model"]["hidden"] for job in jobs]
    assert hidden[0] != hidden[1]


def test_a_variant_is_composed_once(monkeypatch):
    composed = []
    compose = plan.compose
    monkeypatch.setattr(plan, "compose", lambda words: composed.append(words) or compose(words))
    jobs = plan.plan_jobs(["attention=gqa,mqa", "seed=range(0,5)"], "params", Path("out"))["text"]
    assert len(jobs) == 10 and len(composed) == 2
