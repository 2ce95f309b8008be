"""Task rows are generated as in the papers, and evaluations score their answers."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from data.loader import IGNORE_INDEX
from data.slices import NUM_BINS, bin_name
from data.tasks import Recall
from tests.conftest import TINY
from tests.training.test_train_command import metrics
from training.metrics import corpus_metrics

CONTEXT = 75
COMMON = {"context": CONTEXT, "vocab_size": 64}


def recall(**changed) -> Recall:
    settings = {"pairs": [3, 7, 16], "power": 0.01} | COMMON
    return Recall(**settings | changed)


def row(task, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, and the target and distance at each position."""
    drawn = task.row(np.random.default_rng(seed), size)
    targets, distances = np.full((2, CONTEXT), IGNORE_INDEX)
    targets[drawn.positions] = drawn.answers
    distances[drawn.positions] = drawn.distances
    return drawn.inputs, targets, distances


def test_each_recall_query_has_the_value_of_its_key_as_target():
    """Keys are in the lower half of the ids and unused positions are 0, as in Zoology."""
    seen = set()
    for seed, size in enumerate((3, 7, 16) * 20):
        inputs, targets, distances = row(recall(), size, seed)
        values = {}
        positions = {}
        for position in range(0, 2 * size, 2):
            values[inputs[position]] = inputs[position + 1]
            positions[inputs[position]] = position
        assert len(values) == len(set(values.values())) == size
        assert min(values) > 0 and max(values) < 32 <= min(values.values())
        seen |= {*values, *values.values()}
        (queries,) = np.nonzero(targets != IGNORE_INDEX)
        # Each key is queried once, at an even position after the last pair.
        assert sorted(inputs[queries]) == sorted(values)
        assert (queries % 2 == 0).all() and (queries >= 2 * size).all()
        assert np.count_nonzero(inputs) == 3 * size
        for query in queries:
            key = inputs[query]
            assert targets[query] == values[key]
            assert distances[query] == query - positions[key]
    assert seen == {*range(1, 63)}  # all ids except 0 and BOS, which is the last id


def test_the_floor_is_the_accuracy_of_guessing_the_most_frequent_answer():
    # Values within a row differ.
    assert recall().floor() == pytest.approx((1 / 3 + 1 / 7 + 1 / 16) / 3)


def test_query_distances_follow_the_power_law():
    task = recall(power=0.01)
    num_places = (CONTEXT - 2) // 2
    counts = np.zeros(num_places)
    for seed in range(2000):
        _, targets, _ = row(task, 1, seed)
        (query,) = np.flatnonzero(targets != IGNORE_INDEX)
        counts[(query - 2) // 2] += 1
    weights = np.arange(1, num_places + 1) ** -0.99
    assert chisquare(counts, 2000 * weights / weights.sum()).pvalue > 0.01


def test_rows_depend_only_on_seed_and_row_number():
    task = recall()
    corpus = task.corpus()
    loader = corpus.loader(CONTEXT, 8, seed=1)
    inputs, targets, positions = loader(3)
    # Splitting the batch or changing its size does not change the rows.
    parts = [loader(3, slice(first, first + 2)) for first in range(0, 8, 2)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    answers = torch.cat([part[0].flatten()[part[2]] for part in parts])
    assert torch.equal(answers, inputs.flatten()[positions])
    smaller = corpus.loader(CONTEXT, 4, seed=1)
    assert torch.equal(torch.cat([smaller(6)[1], smaller(7)[1]]), targets)
    # Different steps, different seeds and evaluations use different rows.
    others = [loader(4)[0], corpus.loader(CONTEXT, 8, seed=2)(3)[0]]
    assert not any(torch.equal(inputs, other) for other in others)
    assert not torch.equal(inputs[0], inputs[3])  # rows with the same number of pairs
    held_out, *_ = next(iter(corpus.evaluation(8 * CONTEXT, CONTEXT, 8)))
    assert not torch.equal(held_out, corpus.loader(CONTEXT, 8, seed=0)(0)[0])
    assert loader.num_targets(3) == (targets != IGNORE_INDEX).sum()


def test_accuracies_match_a_loop_over_the_rows():
    corpus = recall(pairs=[3, 7]).corpus()
    answered = defaultdict(list)
    totals = np.zeros((3, 2, NUM_BINS))
    generator = np.random.default_rng(0)
    for _, targets, cells, _ in corpus.evaluation(10 * CONTEXT, CONTEXT, 4):
        # Simulate a model that is right half of the time.
        is_right = generator.random(targets.shape) < 0.5
        for index, target in np.ndenumerate(targets.numpy()):
            if target == IGNORE_INDEX:
                continue
            row_index, column = divmod(int(cells[index]), NUM_BINS)
            totals[:, row_index, column] += (2.0, is_right[index], 1)
            answered[int((targets[index[0]] != IGNORE_INDEX).sum())].append(is_right[index])
            answered[f"distance {bin_name(column)}"].append(is_right[index])
    metrics = corpus_metrics(corpus, totals, 10 * CONTEXT)
    # Ten rows, also if they do not fill the last batch.
    assert [len(answered[size]) for size in (3, 7)] == [5 * 3, 5 * 7]
    accuracies = [np.mean(answered.pop(size)) for size in (3, 7)]
    found = [metrics[f"recall_accuracy_{size}"] for size in (3, 7)]
    assert found == pytest.approx(accuracies)
    assert metrics["recall_accuracy"] == pytest.approx(np.mean(accuracies))
    assert metrics["val_loss"] == pytest.approx(2.0) and metrics["val_bpb"] is None
    for name, values in answered.items():
        found = metrics["slices"][name]
        assert found == {"accuracy": pytest.approx(np.mean(values)), "tokens": len(values)}


def test_a_task_run_is_trained_evaluated_and_resumed(command):
    words = [*TINY, "data=recall", "data.pairs=[2,4]", "data.vocab_size=128", "run_dir=run"]
    command("train.py", *words, "steps=2", "eval_every=2").succeeded()
    first, *_, last = metrics("run")
    assert {"recall_accuracy", "recall_accuracy_2", "recall_accuracy_4"} <= last.keys()
    # The loss is averaged over answers, so it starts near the loss of random guessing.
    assert 4 < first["train_loss"] < 6
    command("train.py", *words, "steps=3", "resume=true").succeeded()
    assert metrics("run")[-1]["step"] == 3


def test_a_task_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="context=32"):
        recall(context=32)
    with pytest.raises(ValueError, match=r"data\.vocab_size=32"):
        recall(vocab_size=32)


@pytest.mark.long
def test_full_attention_recalls_all_values_and_a_window_recalls_only_nearby_values(command):
    """64 tokens and 4 pairs, as in Zoology's figure 2, with a convolution before each attention."""
    words = ("data=recall", "context=64", "data.pairs=[4]", "ffn=none", "model.dim=64")
    words = (*words, "model.depth=2", "model.heads=1", "device=cpu", "attention=conv")
    words = (*words, "attention.kv_heads=1", "batch_tokens=2048", "steps=1000", "max_minutes=null")
    last = {}
    for name, chosen in (("full", []), ("short", ["attention.window=4"])):
        intervals = ("save_every=1000", "sample_every=1000", f"name={name}")
        assert command("train.py", *words, *chosen, *intervals).code == 0
        last[name] = metrics(Path("runs", name))[-1]
    assert last["full"]["recall_accuracy"] > 0.99
    slices = last["short"]["slices"]
    # Beyond the reach of windows and convolutions, the model can only guess one of four values.
    assert slices["distance 33-64"]["accuracy"] < 0.3
