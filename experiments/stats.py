"""The paper's test (appendix F), and the interval that is now customary beside it."""

from collections import namedtuple

import numpy as np
from scipy import stats

VanElteren = namedtuple("VanElteren", "z p highest_z")  # highest_z: what this many runs can reach at most


def van_elteren(strata):
    """Is the first sample larger? A stratified Mann-Whitney test, one-sided, by the normal approximation.

    strata: pairs of samples, a pair for each game. Ranks are taken within a game, and a game with n runs weighs
    1 / (n + 1), the locally most powerful choice. Ties get mid-ranks, and lower the variance accordingly.
    """
    distance = variance = highest = 0
    for first, second in strata:
        m, n = len(first), len(first) + len(second)
        values = np.concatenate([first, second])
        rank_sum = stats.rankdata(values)[:m].sum()
        _, ties = np.unique(values, return_counts=True)
        spread = n + 1 - (ties**3 - ties).sum() / (n * (n - 1))
        weight = 1 / (n + 1)
        distance += weight * (rank_sum - m * (n + 1) / 2)
        highest += weight * m * (n - m) / 2
        variance += weight**2 * m * (n - m) / 12 * spread
    if variance == 0:  # all values the same
        return VanElteren(0.0, 0.5, 0.0)
    z = distance / np.sqrt(variance)
    return VanElteren(float(z), float(stats.norm.sf(z)), float(highest / np.sqrt(variance)))


def interquartile_mean(*samples, axis=-1):
    """The mean of the middle half of all runs together: few outliers do not decide it."""
    return stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)


def mean_difference(*samples, axis=-1):
    """The mean over games of first minus second. Samples: the games of the first setting, then those of the second."""
    means = [np.mean(sample, axis=axis) for sample in samples]
    half = len(means) // 2
    return np.mean(means[:half], axis=0) - np.mean(means[half:], axis=0)


def how_far_apart(samples, resamples=9999):
    """The range of the samples' means, and p: how often runs dealt out to the samples at random are as far apart."""
    test = stats.permutation_test(
        samples,
        lambda *x, axis: np.ptp([np.mean(sample, axis=axis) for sample in x], axis=0),
        vectorized=True,
        n_resamples=resamples,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(test.statistic), float(test.pvalue)


def stratified_interval(samples, statistic=interquartile_mean, resamples=2000):
    """A 95% bootstrap interval, with runs drawn anew within each game. None if a game has one run only."""
    if min(map(len, samples)) < 2:
        return None
    result = stats.bootstrap(
        samples, statistic, n_resamples=resamples, method="percentile", vectorized=True, rng=np.random.default_rng(0)
    )
    return tuple(map(float, result.confidence_interval))


def second_half(values):
    """Mean over the second half of a run."""
    return values[len(values) // 2 :].mean() if len(values) else np.nan


def swing(values):
    """By what factor values go up and down within a tenth of a run, typically; not counting its first tenth."""
    values = values[len(values) // 10 :]
    if len(values) < 10 or values.min() <= 0:
        return np.nan
    return np.median([piece.max() / piece.min() for piece in np.array_split(values, min(10, len(values) // 5))])
