"""Plan the runs of a comparison: its variants, and the jobs that train them."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from data.corpus import Corpus
from model.build import build_model
from model.transformer import Transformer
from run.settings import Settings
from tools.compare.jobs import Job, train_all
from tools.compare.sweep import TOKENIZERS, Variants, expand_sweep, name_variants
from tools.compare.tuning import FACTORS, find_optimum, next_factor, rate_losses
from training.setup import Start, open_data, read_settings

SIZE_TOLERANCE = 0.005  # sizes count as equal up to this relative difference
# The measures of model size that --match can make equal.
SIZES = {"params": Transformer.num_parameters, "flops": Transformer.training_flops}
SEARCH_SEED = 1000  # seed of the learning-rate search, not used for verdicts


@dataclass
class Variant:
    """A variant: overrides to train with several seeds, and a factor for its learning rates."""

    name: str
    overrides: list[str]
    settings: Settings  # of `overrides`
    text: str  # SHA-256 of the prepared text
    seeds: list[int]
    folder: Path
    baseline: str  # the first variant of its size
    swept: list[str]  # the keys with several values
    factor: float = 1.0
    searched: list[Job] = field(default_factory=list)  # the runs of the search for the best factor

    def job(self, seed: int, factor: float | None = None) -> Job:
        """Return the job with a seed and a factor, which defaults to the variant's own factor."""
        label = self.name
        scale = self.factor
        if factor is not None:
            label += f"-x{factor:g}"
            scale = factor
        run_dir = self.folder / f"{label}-{seed}"
        job = Job(
            run_dir,
            [*self.overrides, f"run_dir={quoted(run_dir)}", "resume=true"],
            deepcopy(self.settings.model_dump() | {"text": self.text}),
            self.swept,
            self.baseline,
            factor,
        )
        job.set("seed", seed)
        if scale != 1.0:
            for key, value in self.settings.optimizer.items():
                if key == "lr" or key.endswith("_lr"):
                    job.set(f"optimizer.{key}", float(f"{value * scale:.4g}"))
        return job

    def search(self) -> list[Job]:
        """Return the next jobs of the search for the best factor; once it is over, set `factor`."""
        runs = [job.run for job in self.searched if job.run is not None]
        losses = rate_losses(runs)
        has_failed = len(runs) < len(self.searched)  # a failed run would fail again if repeated
        factors = []
        if not self.searched:
            factors = FACTORS
        elif not has_failed:
            factor = next_factor(losses)
            if factor is not None:
                factors = [factor]
        if losses and not factors:
            self.factor = find_optimum(losses).factor
        jobs = [self.job(SEARCH_SEED, factor) for factor in factors]
        self.searched += jobs
        return jobs


def quoted(path: Path) -> str:
    """Return a path as the value of an override."""
    return json.dumps(str(path), ensure_ascii=False)


def plan_variants(
    overrides: list[str], match: str, folder: Path | None, has_search: bool
) -> list[Variant]:
    """Plan the variants, the baseline first, and prepare their text.

    Runs go to `folder`. If it is None, they go to a folder shared by all comparisons with the same
    baseline, `match` and `has_search`. Raises ValueError for variants that cannot be compared, and
    exits with an error for overrides that cannot be trained here.
    """
    sweep = expand_sweep(overrides)
    if match != "none" and len(sweep.get("model.hidden", [])) > 1:
        raise ValueError(
            f"model.hidden cannot be swept, because --match {match} sets it. fix: --match none"
        )
    # Seeds are repetitions of a variant; all other keys define variants.
    try:
        seeds = [int(word.partition("=")[2]) for word in sweep.pop("seed", ["seed=0"])]
    except ValueError as error:
        raise ValueError(f"seeds must be integers ({error}). fix: seed=0,1,2") from None
    if has_search and SEARCH_SEED in seeds:
        raise ValueError(f"--tune reserves this seed (seed={SEARCH_SEED}). fix: seed=0,1,2")
    variants = name_variants(sweep)
    if folder is None:
        baseline_words, *_ = variants.values()
        words = [match, *baseline_words]
        if has_search:
            words.append("tune")
        folder = Path("runs", f"compare-{crc32(' '.join(words).encode()):08x}")

    # Open the texts first, because a tokenizer determines the vocabulary, and so the sizes.
    starts = {name: read_settings(words)[:2] for name, words in variants.items()}
    opened = {}
    hashes = {}  # of the texts
    for name, (settings, start) in starts.items():
        settings, corpus = open_text(settings, start, opened)
        starts[name] = (settings, start)
        hashes[name] = corpus.sha256
    swept = [key for key, words in sweep.items() if len(words) > 1]
    if len({*hashes.values()}) > 1 and {*TOKENIZERS}.isdisjoint(swept):
        raise ValueError("the variants have different data, so their losses are not comparable")
    if match != "none":
        match_sizes(variants, starts, match)
    firsts = {}  # first variant by model.dim, the baseline of this size
    planned = []
    for name, words in variants.items():
        settings, start = starts[name]
        baseline = firsts.setdefault(settings.model["dim"], name)
        if start.pretrained is not None:
            # This checkpoint does not change when the run that saved it is trained further.
            words.append(f"init_from={quoted(start.pretrained)}")
            settings = settings.model_copy(update={"init_from": str(start.pretrained)})
        planned.append(Variant(name, words, settings, hashes[name], seeds, folder, baseline, swept))
    return planned


def open_text(
    settings: Settings, start: Start, corpora: dict[str, tuple[Settings, Corpus]]
) -> tuple[Settings, Corpus]:
    """Prepare a variant's text, or take it from `corpora`.

    Returns the settings as training would save them, and the corpus.
    """
    key = json.dumps([settings.data, str(start.pretrained)])
    if key not in corpora:
        corpora[key] = open_data(settings, start)[:2]
    opened, corpus = corpora[key]
    model = settings.model | {"vocab_size": opened.model["vocab_size"]}
    return settings.model_copy(update={"model": model}), corpus


def train_variants(variants: list[Variant], has_search: bool) -> list[Job]:
    """Train all missing runs, beginning with the learning-rate search, and return all jobs."""
    jobs = []
    # Search until no variant has another factor to try.
    if has_search:
        while searching := [job for variant in variants for job in variant.search()]:
            jobs += train_after(jobs, searching)

    # Then train seed by seed, without variants whose search did not finish.
    judging = []
    for seed in variants[0].seeds:
        for variant in variants:
            if all(job.run is not None for job in variant.searched):
                judging.append(variant.job(seed))
    if judging:  # empty if every search has failed
        jobs += train_after(jobs, judging)
    return jobs


def train_after(earlier: list[Job], jobs: list[Job]) -> list[Job]:
    """Train jobs and return them. The first job of each size determines how long the others train.

    The first job of a size may be among the `earlier` jobs.
    """
    firsts = {}  # first job of each size, by the name of the baseline
    for job in [*earlier, *jobs]:
        first = firsts.setdefault(job.compared_with, job)
        if job is not first:
            job.baseline = first
    train_all(sorted(jobs, key=lambda job: job.baseline is not None))
    return jobs


def match_sizes(variants: Variants, starts: dict[str, tuple[Settings, Start]], match: str) -> None:
    """Set each variant's model.hidden to match the size of the first variant of its model.dim."""
    size = SIZES[match]
    targets = {}
    for name, (settings, start) in starts.items():
        model = settings.model
        target = targets.setdefault(model["dim"], size(build_model(model, "meta")))
        hidden = match_hidden(model, size, target)
        if hidden == model["hidden"]:
            continue
        if hidden is None or start.pretrained is not None:  # a trained model keeps its width
            raise ValueError(f"{name} cannot match the baseline's size. fix: --match none")
        change = f"model.hidden={hidden} instead of {model['hidden']}"
        print(f"{name}: {change} (--match {match})", file=sys.stderr)
        variants[name].append(f"model.hidden={hidden}")
        model = model | {"hidden": hidden}
        starts[name] = (settings.model_copy(update={"model": model}), start)


def match_hidden(model: dict, size: Callable[[Transformer], float], target: float) -> int | None:
    """Return a feed-forward width at which the model has about the `target` size.

    Prefers the current width. Returns None if there is no such width.
    """

    def size_with(hidden: int) -> float:
        return size(build_model(model | {"hidden": hidden}, "meta"))

    # Size is linear in the width. Among the widths that are close enough, take the one divisible by
    # the largest power of two (at most 64), for the fastest matrix products.
    low = size_with(64)
    step = size_with(128) - low
    exact = 0.0  # no feed-forward layer
    if step != 0:
        exact = 64 + 64 * (target - low) / step
    multiples = [round(exact / unit) * unit for unit in (64, 32, 16, 8, 4, 2, 1)]
    for hidden in (model["hidden"], *multiples):
        if hidden > 0 and abs(size_with(hidden) / target - 1) <= SIZE_TOLERANCE:
            return hidden
    return None
