"""Each variant is judged at its best learning rate: the search, and the whole procedure."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tools.compare.statistics import judge
from tools.compare.tuning import FACTORS, FARTHEST, Optimum, find_optimum, next_factor, rate_losses

SD = 0.004  # standard deviation of the loss over seeds
MARGIN = 0.01


def parabola(optimum: float, curvature: float = 0.01, factors=FACTORS) -> dict[float, float]:
    return {factor: 1 + curvature * math.log2(factor / optimum) ** 2 for factor in factors}


def searched(loss) -> dict[float, float]:
    """Run a complete search with losses given by a function of the factor."""
    losses = {factor: loss(factor) for factor in FACTORS}
    while (factor := next_factor(losses)) is not None:
        assert factor not in losses
        losses[factor] = loss(factor)
    return losses


@pytest.mark.parametrize("optimum", [0.03, 1.3, 20.0])
def test_the_optimum_of_a_parabola_is_found_exactly(optimum):
    losses = searched(lambda factor: parabola(optimum, factors=[factor])[factor])
    assert find_optimum(losses) == pytest.approx(Optimum(optimum, True))


@pytest.mark.parametrize("sign, last", [(-1, FARTHEST), (1, 1 / FARTHEST)])
def test_a_best_rate_at_the_edge_extends_the_range_up_to_the_limit(sign, last):
    losses = searched(lambda factor: 1 + sign * 0.01 * math.log2(factor))
    assert last in (min(losses), max(losses)) and len(losses) == len(FACTORS) + 4
    assert find_optimum(losses) == Optimum(last, False)


def test_a_diverged_rate_ends_the_range_and_is_excluded_from_the_fit():
    losses = parabola(1.5) | {4.0: math.inf}
    assert next_factor(losses) is None
    assert find_optimum(losses) == pytest.approx(Optimum(1.5, True))
    # The optimum does not move from the best factor toward the diverged one.
    losses = {0.25: 1.9, 0.5: 1.4, 1.0: 1.0, 2.0: math.inf, 4.0: math.inf}
    assert find_optimum(losses).factor == 1.0


def test_the_optimum_stays_next_to_the_best_factor():
    near = parabola(2.0, factors=[0.5, 1.0, 2.0, 4.0, 8.0])
    assert find_optimum(near | {0.125: 50.0, 64.0: 90.0}) == pytest.approx(find_optimum(near))
    # All points are nearly on a line.
    losses = {0.25: 1.4, 0.5: 1.3, 1.0: 1.2, 2.0: 1.1, 4.0: 1.1001}
    assert 1 <= find_optimum(losses).factor <= 4
    # A maximum is not an optimum.
    assert find_optimum({0.25: 1.0, 0.5: 1.4, 1.0: 0.99, 2.0: 1.4, 4.0: 1.0}).factor == 1.0


def test_losses_are_means_over_seeds_and_infinite_if_a_seed_diverged():
    runs = [
        SimpleNamespace(factor=factor, has_diverged=loss is None, last={"val_loss": loss})
        for factor, loss in ((1.0, 3.0), (1.0, 4.0), (2.0, 5.0), (2.0, None))
    ]
    assert rate_losses(runs) == {1.0: 3.5, 2.0: math.inf}


# The whole procedure, in which each variant has a different best rate.


def normal(draw, count: int) -> np.ndarray:
    return draw.normal(0, 1, count)


def heavy_tailed(draw, count: int) -> np.ndarray:
    return draw.standard_t(4, count) / math.sqrt(2)


def tuned(draw, noise, mean: float, spread: float) -> np.ndarray:
    """Search for the rate of a variant, and return the losses of 8 seeds with it."""
    optimum = 2 ** draw.uniform(-1.5, 1.5)

    def losses(factor: float, count: int) -> np.ndarray:
        loss = mean + 0.02 * math.log2(factor / optimum) ** 2
        return loss + spread * noise(draw, count)

    found = find_optimum(searched(lambda factor: losses(factor, 1).item()))
    assert found.is_inside
    return losses(found.factor, 8)


def simulate(num_tables: int, effect=0.0, spreads=(SD,) * 4, noise=normal):
    """Simulate tables of a baseline and three variants; only the first variant has the effect.

    Returns the proportions of tables with a verdict on an equal variant, with an interval that
    misses the truth, and with the effect found.
    """
    draw = np.random.default_rng(0)
    truths = [0.0, effect, 0.0, 0.0]
    false = []
    missed = []
    found = []
    for _ in range(num_tables):
        pairs = zip(truths, spreads, strict=True)
        baseline, *others = [tuned(draw, noise, 1 + truth, spread) for truth, spread in pairs]
        verdicts = judge(baseline, dict(enumerate(others, 1)), MARGIN)
        called = {name for name, each in verdicts.items() if not each.low <= 0 <= each.high}
        false.append(any(truths[name] == 0 for name in called))
        missed.append(any(not each.low <= truths[i] <= each.high for i, each in verdicts.items()))
        found.append(1 in called)
    return np.mean(false), np.mean(missed), np.mean(found)


def test_an_effect_is_found_and_equal_variants_get_no_verdict():
    """A short version of the test below."""
    false, missed, found = simulate(16, effect=2 * SD)
    assert false <= 0.2 and missed <= 0.2 and found >= 0.7


@pytest.mark.long
@pytest.mark.parametrize(
    "options, allowed",
    [
        ({}, 0.05),
        ({"effect": 2 * SD}, 0.05),
        ({"noise": heavy_tailed}, 0.05),
        # The test for equal variances misses some cases, in which the pooled variance is too small.
        ({"spreads": (SD, 3 * SD, SD, SD)}, 0.08),
        ({"spreads": (3 * SD, SD, SD, SD)}, 0.08),
    ],
)
def test_at_most_one_table_in_twenty_has_an_error(options, allowed):
    """Simulates 1,000 tables. The bound is three standard deviations above `allowed`."""
    false, missed, found = simulate(1000, **options)
    print(f"found {found:.3f}, false {false:.3f}, missed {missed:.3f}")
    bound = allowed + 3 * math.sqrt(allowed * (1 - allowed) / 1000)
    assert false <= bound and missed <= bound
    if "effect" in options:
        assert found >= 0.8
