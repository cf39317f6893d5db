"""The statistics of the experiments, against SciPy and against counting all cases."""

import itertools
import sys

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm, studentized_range, ttest_ind

from helpers import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
from lab.inference import (  # noqa: E402
    bootstrap_interval,
    holm,
    how_far_apart,
    interquartile_mean,
    mean_difference,
    share_between,
    told_apart,
    van_elteren,
    wider,
    within,
)

DISTINCT = [([3.0, 1.0, 4.0], [1.5, 0.2, 2.0]), ([0.1, 0.9], [0.5, 0.3, 0.2])]
WITH_TIES = [([3.0, 1.0, 1.0], [1.0, 0.2, 3.0]), ([0.1, 0.5], [0.5, 0.5, 0.2])]


@pytest.mark.parametrize("first, second", DISTINCT + WITH_TIES)
def test_one_stratum_is_the_mann_whitney_test(first, second):
    expected = mannwhitneyu(first, second, alternative="greater", method="asymptotic", use_continuity=False)
    assert van_elteren([(first, second)]).p == pytest.approx(expected.pvalue, rel=1e-12)


def mid_rank(value, values):
    return sum(x < value for x in values) + (sum(x == value for x in values) + 1) / 2


def all_statistics(strata):
    """The weighted rank sum for every way in which the runs of each game could have been dealt to the two settings."""
    sums = []
    for first, second in strata:
        values = [*first, *second]
        ranks = [mid_rank(x, values) / (len(values) + 1) for x in values]
        sums.append(
            [sum(dealt) for dealt in itertools.combinations(ranks, len(first))]
        )  # the first is the one observed
    return np.array([sum(choice) for choice in itertools.product(*sums)])


@pytest.mark.parametrize("strata", [DISTINCT, WITH_TIES, DISTINCT + WITH_TIES[:1]])
def test_z_is_the_distance_within_the_permutation_distribution(strata):
    statistics = all_statistics(strata)
    result = van_elteren(strata)
    assert result.z == pytest.approx((statistics[0] - statistics.mean()) / statistics.std(), rel=1e-12)
    assert result.p == pytest.approx(norm.sf(result.z))


def test_p_is_near_the_exact_one():
    random = np.random.default_rng(0)
    strata = [(random.normal(0.8, 1, 4), random.normal(0, 1, 4)) for _ in range(3)]
    statistics = all_statistics(strata)
    exact = np.mean(statistics >= statistics[0] - 1e-9)
    assert 0.001 < exact < 0.1
    assert van_elteren(strata).p == pytest.approx(exact, abs=0.01)


def test_games_weigh_by_their_number_of_runs():
    large, small = ([1, 2, 3, 4, 5, 16], [6, 7, 8, 9, 10, 11]), ([2, 3], [1, 0])
    z = van_elteren([large, small]).z
    distance = (27 - 39) / 13 + (7 - 5) / 5
    variance = 36 / 12 * 13 / 13**2 + 4 / 12 * 5 / 5**2
    assert z == pytest.approx(distance / variance**0.5)


def test_the_highest_z_is_that_of_samples_that_do_not_overlap():
    """The paper's: 16 games and 3 seeds, and 3.84 for its 16 hypotheses."""
    result = van_elteren([([4, 5, 6], [1, 2, 3])] * 16)
    assert result.z == pytest.approx(result.highest_z) == pytest.approx(7.856, abs=0.001)
    assert norm.isf(0.001 / 16) == pytest.approx(3.84, abs=0.005)


def test_equal_values_show_nothing():
    assert van_elteren([([1, 1], [1, 1])] * 3)[:2] == (0, 0.5)


def test_interquartile_mean_is_the_mean_of_the_middle_half():
    samples = [np.array([9.0, 1.0, 2.0, 100.0]), np.array([-50.0, 4.0, 3.0, 5.0])]
    assert interquartile_mean(*samples) == pytest.approx((2 + 3 + 4 + 5) / 4)


def test_the_bootstrap_draws_within_games():
    """Runs that agree within each game leave nothing to chance, however much the games differ."""
    assert bootstrap_interval([np.full(3, 0.1), np.full(3, 0.9)], interquartile_mean) == pytest.approx((0.5, 0.5))
    assert bootstrap_interval([np.array([0.1]), np.array([0.2, 0.3])], interquartile_mean) is None


def test_the_bootstrap_interval_is_that_of_all_resamples():
    games = [np.array([0.13, 0.42, 0.8, 0.91]), np.array([0.3, 0.61, 0.77])]
    draws = itertools.product(*(itertools.product(game, repeat=len(game)) for game in games))
    low, high = np.quantile([interquartile_mean(*map(np.array, draw)) for draw in draws], [0.025, 0.975])
    assert bootstrap_interval(games, interquartile_mean, resamples=20_000) == pytest.approx((low, high), abs=0.02)


def test_mean_difference_is_taken_game_by_game():
    first, second = [np.array([1.0, 3.0]), np.array([10.0])], [np.array([1.0]), np.array([4.0, 6.0])]
    assert mean_difference(*first, *second) == pytest.approx(((2 - 1) + (10 - 5)) / 2)


@pytest.mark.parametrize("samples", [[[1.0, 2.0], [3.0, 5.0], [9.0, 2.5]], [[0.1, 4.0, 2.2], [1.0, 3.0], [5.0, 3.5]]])
def test_how_far_apart_is_counted_over_all_ways_to_deal_out_the_runs(samples):
    def distance(order):
        cuts = itertools.accumulate([0, *map(len, samples)])
        means = [np.mean(order[low:high]) for low, high in itertools.pairwise(cuts)]
        return max(means) - min(means)

    runs = [x for sample in samples for x in sample]
    all_distances = np.array([distance(order) for order in itertools.permutations(runs)])
    observed, p = how_far_apart(samples)
    assert observed == pytest.approx(distance(runs))
    assert 0.05 < p < 0.9 and p == pytest.approx(np.mean(all_distances >= observed - 1e-12))


def test_the_p_of_four_sizes_and_three_seeds_is_exact():
    """Of all 15,400 ways to deal out 12 runs to 4 sizes, 10 are as far apart: the middle six may be dealt anyhow."""
    samples = [[0.0, 0.1, 0.2], [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [9.0, 9.1, 9.2]]
    distance, p = how_far_apart(samples)
    assert distance == pytest.approx(9) and p == pytest.approx(10 / 15_400)
    many = [np.arange(6) + 100 * place for place in range(5)]  # too many ways to count: drawn at random, and never 0
    assert how_far_apart(many)[1] == pytest.approx(1 / 9999)


def test_wider_counts_all_swaps():
    rng = np.random.default_rng(1)
    reference = rng.normal(size=2)
    original, ablated = [rng.normal(size=2) for _ in range(2)], [rng.normal(2, size=2) for _ in range(2)]

    def gain(first, second, known):
        means = [[np.mean(x) for x in (*known, *side)] for side in (first, second)]
        return max(means[1]) - min(means[1]) - max(means[0]) + min(means[0])

    def swaps(a, b):
        pooled = [*a, *b]
        for chosen in itertools.permutations(range(4), 2):  # each way twice
            yield [pooled[i] for i in chosen], [pooled[i] for i in range(4) if i not in chosen]

    for known in ([reference], []):
        observed = gain(original, ablated, known)
        counted = [
            gain(*zip(*pairs, strict=True), known) for pairs in itertools.product(*map(swaps, original, ablated))
        ]
        p = np.mean(np.array(counted) >= observed - 1e-12)
        assert wider(known[0] if known else None, original, ablated) == pytest.approx((observed, p))


def test_sameness_is_bounded_as_often_as_it_says():
    """Four settings with known means: the largest difference is within the bound in 90% of trials, or somewhat more."""
    rng, truth = np.random.default_rng(2), np.array([0, 0.3, 0.1, 0.2])
    bounds = [within(list(truth[:, None] + rng.normal(size=(4, 5)))) for _ in range(150)]
    assert 0.87 <= np.mean(np.array(bounds) >= 0.3) <= 1
    exact = studentized_range.ppf(0.9, 2, 8) / np.sqrt(2) * np.sqrt(2.5 * 2 / 5)
    assert within([np.arange(5.0), np.arange(5.0)]) == pytest.approx(exact)


def test_what_tukey_tells_apart():
    """Two groups: a t test's p, which is what the studentised range gives for two; of three, the one that is away."""
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=8), rng.normal(1, size=8)
    p = ttest_ind(first, second).pvalue
    assert 0.001 < p < 0.2
    assert told_apart([first, second], p * 1.01) == [(0, 1)] and told_apart([first, second], p * 0.99) == []
    assert told_apart([first, first + 0.1, first + 9]) == [(0, 2), (1, 2)]


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # a textbook's example
    assert holm([0.6, 0.9]) == [1, 1]


@pytest.mark.parametrize("seeds", [5, 20])
def test_wider_with_too_many_swaps_to_count(seeds):
    """Many seeds, four sizes: drawn at random, and near what a sure effect and none must give."""
    rng = np.random.default_rng(3)
    original = [rng.normal(size=seeds) for _ in range(4)]
    assert wider(None, original, [x + shift for x, shift in zip(original, (0, 40, 80, 120), strict=True)])[1] < 0.001
    assert wider(None, original, original)[1] > 0.3


def test_swaps_drawn_at_random_are_near_all_of_them(monkeypatch):
    rng = np.random.default_rng(4)
    original, ablated = ([rng.normal(x, size=3) for x in shifts] for shifts in ((0, 0, 0), (0, 1, 2)))
    exact = wider(None, original, ablated)
    monkeypatch.setattr("lab.inference.MOST_WAYS", 1)
    drawn = wider(None, original, ablated)
    assert drawn[0] == exact[0] and drawn[1] != exact[1] == pytest.approx(drawn[1], abs=0.02)


def test_the_share_of_the_variance_is_that_of_a_regression_on_the_groups():
    rng, groups = np.random.default_rng(0), [8, 4, 2, 16, 8, 4]
    samples = [rng.normal(group, 3, size) for group, size in zip(groups, [3, 3, 2, 3, 4, 3], strict=True)]
    y, x = np.concatenate(samples), np.repeat(groups, [len(sample) for sample in samples])
    columns = (x[:, None] == np.unique(x)).astype(float)
    residual = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    assert share_between(groups, *samples) == pytest.approx(1 - residual @ residual / ((y - y.mean()) ** 2).sum())
    many = [np.stack([sample, -sample]) for sample in samples]  # as the bootstrap calls it
    assert share_between(groups, *many, axis=-1) == pytest.approx([share_between(groups, *samples)] * 2)
    assert share_between([1, 1, 2], [5, 5], [5], [7, 7]) == 1 and share_between([1, 1], [5, 1], [1, 5]) == 0
