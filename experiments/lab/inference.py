"""Statistics: the paper's test (appendix F), tests of sameness, intervals, measures of a run. Numbers in and out."""

import functools
import itertools
import math
from collections import Counter, namedtuple

import numpy as np
from scipy import stats

VanElteren = namedtuple("VanElteren", "z p highest_z")  # highest_z: what this many runs can reach at most
MOST_WAYS = 100_000  # to deal out runs, that are counted one by one


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


def how_far_apart(samples):
    """The range of the samples' means, and p: how often runs dealt out to the samples at random are as far apart."""
    values, sizes = np.concatenate(samples), tuple(map(len, samples))
    ways = math.factorial(len(values)) // math.prod(map(math.factorial, sizes))
    if ways // math.prod(map(math.factorial, Counter(sizes).values())) <= MOST_WAYS:
        groups = all_deals(sizes)
    else:
        rng = np.random.default_rng(0)
        groups = rng.permuted(np.tile(np.repeat(np.arange(len(sizes)), sizes), (9999, 1)), axis=1)
        groups[0] = np.repeat(np.arange(len(sizes)), sizes)  # the one observed counts, too: p is never 0
    means = np.stack([(values * (groups == group)).sum(1) / size for group, size in enumerate(sizes)])
    distance = np.ptp([np.mean(sample) for sample in samples])
    return float(distance), float(np.mean(np.ptp(means, axis=0) >= distance - 1e-12))


@functools.cache
def all_deals(sizes):
    """All ways to deal out runs to groups, a row each with a group for each run. Equal groups may swap their names."""

    def deal(runs, groups):
        if not groups:
            yield {}
            return
        first, *others = runs
        for group in {sizes[group]: group for group in groups}.values():
            for mates in itertools.combinations(others, sizes[group] - 1):
                left = [run for run in others if run not in mates]
                for rest in deal(left, [x for x in groups if x != group]):
                    yield rest | dict.fromkeys((first, *mates), group)

    number = range(sum(sizes))
    return np.array([[way[run] for run in number] for way in deal(number, range(len(sizes)))])


def within(samples, confidence=0.9):
    """No two means are further apart than this: the bound of Tukey's test, for all pairs at once."""
    interval = stats.tukey_hsd(*samples).confidence_interval(confidence)
    return float(np.abs([interval.low, interval.high]).max())


def told_apart(samples, level=0.05):
    """Pairs of samples, by their places, whose means Tukey's test tells apart."""
    p = stats.tukey_hsd(*samples).pvalue
    return [(i, j) for i, j in itertools.combinations(range(len(samples)), 2) if p[i, j] < level]


def wider(reference, original, ablated):
    """By how much the ablation widens the range of the settings' means, and p: how often a swap of runs does as much.

    reference: runs of a setting that both have in common, or None. original, ablated: a sample for each other setting.
    Within each of them runs are swapped between the two: in all ways, or if these are too many, in 9,999.
    """
    pairs = [(np.concatenate([first, second]), len(first)) for first, second in zip(original, ablated, strict=True)]
    every = math.prod(math.comb(len(values), m) for values, m in pairs) <= 10 * MOST_WAYS
    means, rng = [], np.random.default_rng(0)  # for each setting: the means of original and ablated, in each way
    for values, m in pairs:
        if every:
            dealt = values[np.array(list(itertools.combinations(range(len(values)), m)))]
        else:
            dealt = np.vstack([values, rng.permuted(np.tile(values, (9998, 1)), axis=1)])[:, :m]
        sums = dealt.sum(1)  # the first is as it was: the one observed counts, too
        means.append(np.stack([sums / m, (values.sum() - sums) / (len(values) - m)]))
    indices = np.ix_(*(range(x.shape[1]) for x in means)) if every else [slice(None)] * len(means)

    def spread(side):
        low, high = (np.inf, -np.inf) if reference is None else (np.mean(reference),) * 2
        for x, index in zip(means, indices, strict=True):
            low, high = np.minimum(low, x[side][index]), np.maximum(high, x[side][index])
        return high - low

    gains = spread(1) - spread(0)
    observed = gains.flat[0]
    return float(observed), float(np.mean(gains >= observed - 1e-12))


def holm(p_values):
    """Holm's correction for several tests."""
    order = np.argsort(p_values)
    adjusted = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)).clip(max=1)
    return adjusted[np.argsort(order)].tolist()


def interquartile_mean(*samples, axis=-1):
    """The mean of the middle half of all runs together: few outliers do not decide it."""
    return stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)


def mean_difference(*samples, axis=-1):
    """The mean over games of first minus second. Samples: the games of the first setting, then those of the second."""
    means = [np.mean(sample, axis=axis) for sample in samples]
    half = len(means) // 2
    return np.mean(means[:half], axis=0) - np.mean(means[half:], axis=0)


def share_between(groups, *samples, axis=-1):
    """The share of all variance that lies between groups of samples. groups: each sample's group."""
    every = np.concatenate(samples, axis=axis)
    mean = every.mean(axis=axis, keepdims=True)
    between = 0
    for group in dict.fromkeys(groups):
        members = np.concatenate([x for x, own in zip(samples, groups, strict=True) if own == group], axis=axis)
        between += members.shape[axis] * (members.mean(axis=axis) - mean.squeeze(axis)) ** 2
    return between / ((every - mean) ** 2).sum(axis=axis)


def bootstrap_interval(samples, statistic, resamples=2000, seed=0):
    """A 95% interval, from runs or episodes drawn again within each sample. None if a sample has one only."""
    if min(map(len, samples)) < 2:
        return None
    rng, options = np.random.default_rng(seed), {"method": "percentile", "vectorized": True}
    result = stats.bootstrap(samples, statistic, n_resamples=resamples, rng=rng, **options)
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
