"""An experiment in words and numbers: captions, final returns with their intervals, the tests between settings."""

import functools

import numpy as np

from lab.catalogue import ALGORITHMS, GAMES, runs_of
from lab.inference import (
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
from lab.runs import final_window

LEVEL = 0.001  # the paper's level of significance, to be divided by the number of hypotheses
MEASURES = {"Final normalised return": "final_normalised_return", "Over the whole run": "mean_normalised_return"}
DIFFERENCES = {  # flags that are named where they are not the paper's
    "script": "scripts",
    "total-timesteps": "steps",
    "distribution-mode": "mode",
    "num-levels": "levels",
    "num-envs": "environments",
    "num-steps": "steps of a rollout",
    "channels": "channels",
    "num-minibatches": "minibatches",
    "learning-rate": "step size",
    "epochs": "PPO epochs",
    "arch": "PPG network",
    "n-pi": "iterations a phase",
    "aux-epochs": "auxiliary epochs",
    "aux-rollouts": "auxiliary rollouts",
    "staleness": "staleness",
}
DEFAULTS = {"num-minibatches": 8, "learning-rate": 5e-4}  # of the scripts, and the paper's


def about(results):
    """What the experiment is."""
    run = results.runs[0]
    script = run.script.removesuffix(".py").replace("_", "-")
    return results.entry.about.format(
        algorithm=ALGORITHMS.get(script, "PPO"),
        iteration=run.flags["num-envs"] * run.flags["num-steps"],
        reference=run.flags["reference-num-envs"],
    )


def runs_shown(results, spread="mean and standard deviation", seeds=None):
    """Which runs a figure or a table shows."""
    run, games = results.runs[0], results.games
    mode, levels = (run.flags.get(flag) for flag in ("distribution-mode", "num-levels"))
    if seeds is None:
        seeds = seeds_of(results)
        seeds = "one seed, so there are no error bars" if seeds == "1" else f"{spread} over {seeds} seeds"
    names = ", ".join(f"MinAtar's {x.replace('_', ' ').title()}" if run.patched else x for x in games)
    words = [
        f"Game{'s' * (len(games) > 1)}: {'all 16' if len(games) == 16 else names};",
        f"{mode} mode, {levels or 'all'} level{'s' * (levels != 1)};" if mode else "",
        f"{run.flags['total-timesteps']:,} environment steps; {seeds}.",
    ]
    if results.finished < len(results.runs):
        words.append(f"{len(results.runs) - results.finished} of {len(results.runs)} runs are not finished.")
    return " ".join(filter(None, words))


def seeds_of(results):
    """How many: of each setting, or of the one that has fewest up to the one that has most. Finished runs count, or all
    if none is."""
    rows = results.rows[results.rows["finished"]] if results.finished else results.rows
    counts = rows.groupby(["variant", "value"])["seed"].nunique()
    return " to ".join(map(str, dict.fromkeys([counts.min(), counts.max()])))


def shrunk(results):
    """What is not as in the paper's runs."""
    paper = runs_of(results.experiment, "paper")
    differences = [("games", len(results.games), len({run.game for run in paper}))]
    differences.append(("seeds", seeds_of(results), str(len({run.seed for run in paper}))))
    for flag, what in DIFFERENCES.items():
        mine, theirs = (settings_of(runs, flag) for runs in (results.runs, paper))
        if mine and theirs:
            differences.append((what, mine, theirs))
    words = ", ".join(f"{what} {mine} ({theirs})" for what, mine, theirs in differences if mine != theirs)
    return f"Shrunk (in brackets: the paper): {words}."


def settings_of(runs, flag):
    """All settings of a flag in some runs, in a few words."""
    default = DEFAULTS.get(flag)
    found = {run.script if flag == "script" else run.flags.get(flag, default) for run in runs if flag != "channels"}
    if flag == "channels":
        found = {"-".join(map(str, run.flags[flag])) for run in runs}
    if flag == "num-levels":
        found = {x or "all" for x in found}
    found = sorted(found - {None})
    if len(found) > 2 and flag != "script":
        found = [f"{found[0]} to {found[-1]}"]
    return " and ".join(f"{x:,}" if isinstance(x, int) else str(x) for x in found)


def report(results):
    """The whole report of an experiment, as Markdown."""
    scale, total = results.runs[0].scale, results.runs[0].flags["total-timesteps"]
    parts = [
        f"# {results.experiment}, scale {scale}",
        runs_shown(results) + (f" {shrunk(results)}" if scale != "paper" else ""),
        f"{results.finished} of {len(results.runs)} runs finished; {results.hours:.2f} hours of computing, "
        "one run after another (taking of each setting the median run).",
        f"## Final return, over the last {final_window(total):,} steps",
        overview(results, "final_return"),
        "Mean over seeds, and standard deviation.",
        "## Return over the whole run",
        overview(results, "mean_return"),
        "The same, of the learning curve's mean.",
        "## Final normalised return",
        final_returns(results),
        "IQM: mean of the middle half of the runs. Interval: 95%, by bootstrap within each game; with three or four "
        "seeds such intervals are too narrow.",
    ]
    for kind, what in results.entry.tests.items():
        parts += TESTS[kind](results, results.of_this_scale(what))
    parts += [
        "## What section 6.2 of the paper looks at",
        signs(results),
        "Medians over runs. Clipped ratios: in the second half of a run; with one epoch, 1% to 10% is usual. Swing: by "
        "what factor the standard deviation that advantages are divided by goes up and down within a tenth of a run; "
        "under 10 is fine.",
    ]
    return "\n\n".join(parts) + "\n"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def overview(results, column):
    """Returns as the game gives them: a line for each variant and game, a column for each setting."""
    returns = results.rows.dropna(subset="final_return").set_index(["variant", "game", "value"])[column]
    variants = list(dict.fromkeys(results.all_rows["variant"]))
    columns, rows = max(map(results.values, variants), key=len), []
    for variant, game in [(x, y) for x in variants for y in results.games]:
        named = len(variants) > 1 and [variant] != list(results.entry.panels)  # the only panel needs no name
        name = ", ".join([variant] * named + [game] * (len(results.games) > 1)) or game
        samples = [returns[returns.index == (variant, game, value)] for value in columns]
        rows.append(
            [name, *(f"{x.mean():.2f} ± {x.std():.2f}".replace(" ± nan", "") if len(x) else "" for x in samples)]
        )
    return table([results.entry.axis.split(" (")[0], *columns], rows)


def final_returns(results):
    rows, variants = [], dict.fromkeys(results.all_rows["variant"])
    for variant, value in [(x, y) for x in variants for y in results.values(x)]:
        samples = [sample.to_numpy() for _, sample in results.final(variant, value).groupby("game")]
        if samples:
            seeds = results.over_seeds(variant, value)
            std = f"{np.std(seeds, ddof=1):.3f}" if len(seeds) > 1 else "one seed"
            mean, iqm = np.mean([sample.mean() for sample in samples]), interquartile_mean(*samples)
            interval = between(bootstrap_interval(samples, interquartile_mean))
            rows.append([variant, value, f"{mean:.3f}", std, f"{iqm:.3f}", interval, sum(map(len, samples))])
    return table(["variant", "setting", "mean", "std over seeds", "IQM", "interval of the IQM", "runs"], rows)


def signs(results):
    rows = []
    for (variant, value), runs in results.all_rows.groupby(["variant", "value"], sort=False):
        clipped, swing = (runs[column].dropna().median() for column in ("clip_fraction", "advantage_swing"))
        clipped = "no clipping" if np.isnan(clipped) else f"{clipped:.2%}"
        rows.append([variant, value, clipped, "too few" if np.isnan(swing) else f"{swing:.1f}"])
    return table(["variant", "setting", "clipped ratios", "swing of advantages"], rows)


def between(interval, digits=3):
    return "needs two seeds" if interval is None else " to ".join(f"{x:.{digits}f}" for x in interval)


# The kinds of tests that an experiment's entry may ask for. Each returns a title, a table, and what it says.


def strata_of(first, second):
    """Pairs of samples, for the games that both have."""
    both = [game for game in GAMES if game in first.index and game in second.index]
    return [(first[game].to_numpy(), second[game].to_numpy()) for game in both]


def difference_cells(strata, digits=3):
    """The mean difference, and its interval."""
    samples = [first for first, _ in strata] + [second for _, second in strata]
    interval = bootstrap_interval(samples, mean_difference)
    return f"{mean_difference(*samples):.{digits}f}", between(interval, digits)


def footnote(tests, hypotheses):
    """What the tests are, and what they could show at best."""
    highest = max((test.highest_z for test in tests), default=0)
    return (
        f"Z: van Elteren test, games as strata, one-sided. Significant means p below {LEVEL:g}/{hypotheses}: "
        f"the {LEVEL:.1%} level after Bonferroni correction for {hypotheses} hypotheses. "
        f"With these games and seeds Z is {highest:.2f} at most."
    )


def measures_of(results):
    """Columns for the end and for the whole run, what to call them, digits."""
    columns = [f"{when}_{results.measure}" for when in ("final", "mean")]
    return columns, results.measure.replace("_", " "), 2 if results.measure == "return" else 3


def better(results, question):
    """Is the first better than the second? Pairs: (name, name, [(setting, setting), ...]), strata of one test."""
    title, pairs_of = question
    parts = []
    for measure, column in MEASURES.items():
        rows, tests = [], []
        for first, second, settings in pairs_of(results):
            strata = [x for pair in settings for x in strata_of(*(results.final(*setting, column) for setting in pair))]
            if strata:
                tests.append(van_elteren(strata))
                rows.append([first, second, *difference_cells(strata)])
        for row, test in zip(rows, tests, strict=True):
            significant = "yes" if test.p < LEVEL / len(tests) else "no"
            row += [f"{test.z:.2f} of {test.highest_z:.2f}", f"{test.p:.2g}", significant]
        header = ["better?", "than", "mean difference", "95% interval", "Z, and its highest", "p", "significant"]
        parts += [f"## {title} {measure}", table(header, rows), footnote(tests, max(1, len(tests)))]
    return parts


def table_5(results, ablations):
    """Is the difference between the largest and a smaller batch larger for the ablation?"""
    original, *_ = results.entry.panels
    sizes, parts = results.settings(original), []
    hypotheses = len(ablations) * (len(sizes) - 1)

    def gap(variant, size, column):
        return (results.final(variant, sizes[0], column) - results.final(variant, size, column)).dropna()

    for measure, column in MEASURES.items():
        tests, rows = [], []
        for size in sizes[1:]:
            row = [size]
            for ablation in ablations:
                strata = strata_of(gap(ablation, size, column), gap(original, size, column))
                if not strata:
                    row.append("no runs")
                    continue
                tests.append(van_elteren(strata))
                effect = np.mean([np.mean(a) - np.mean(b) for a, b in strata])
                text = f"{effect:.3f} ({tests[-1].z:.2f})"
                row.append(f"**{text}**" if tests[-1].p < LEVEL / hypotheses else text)
            rows.append(row)
        parts += [
            f"## Hypothesis tests (the paper's table 5), {measure[0].lower() + measure[1:]}",
            table([results.entry.axis, *ablations], rows),
            "By how much the ablation widens the gap to the largest batch size, and Z in parentheses; bold if "
            f"significant. {footnote(tests, hypotheses)}",
        ]
    return parts


def apart(results, variants):
    """Do the curves coincide? How far apart all settings are, and if chance alone would do that."""
    rows, (columns, unit, digits) = [], measures_of(results)
    for variant in variants:
        cells = []
        for column in columns:
            samples = [results.over_seeds(variant, size, column) for size in results.values(variant)]
            if len(samples) < 2 or min(map(len, samples)) < 2:
                cells += ["", "needs two seeds"]
            else:
                distance, p = how_far_apart(samples)
                cells += [f"{distance:.{digits}f}", f"{p:.2g}"]
        rows.append([variant, *cells])
    return [
        f"## How far apart the batch sizes are, {unit}",
        table(["", "at the end", "p", "over the whole run", "p"], rows),
        "The highest mean over seeds minus the lowest. p: how often runs that are dealt out to the sizes at random are "
        "as far apart; a small one says that the batch size matters.",
    ]


def same(results, ablations):
    """Do all settings end alike, with everything adjusted, and does an ablation drive them apart?"""
    (column, _), unit, digits = measures_of(results)
    original, *_ = results.entry.panels
    title, values = f"## Do all batch sizes end alike? {unit[0].upper() + unit[1:]}", results.values(original)

    def samples(variant, values, seeds=None):
        """Returns by seed, for each of these settings."""
        found = [results.final(variant, value, column).groupby("seed").mean() for value in values]
        return [x if seeds is None else x.reindex(seeds).to_numpy() for x in found]

    every = samples(original, values)
    if len(every) < 2 or min(map(len, every)) < 2:
        return [title, "Needs two batch sizes with two seeds each."]
    rows, tests = [], []
    for ablation in ablations:
        seeds = sorted(set.intersection(*(set(x.index) for x in every + samples(ablation, values))))
        if len(seeds) < 2:
            continue
        (first, *others), (own, *ablated) = (samples(variant, values, seeds) for variant in (original, ablation))
        if np.array_equal(first, own):
            gain, p = wider(first, others, ablated)
        else:  # without EWMA, the reference is another run
            gain, p = wider(None, [first, *others], [own, *ablated])
        tests.append(p)
        rows.append([ablation, len(seeds), f"{gain:+.{digits}f}", f"{p:.2g}"])
    for row, p in zip(rows, holm(tests), strict=True):
        row.append(f"{p:.2g}")
    apart = np.ptp([x.mean() for x in every])
    pairs = ", ".join(f"{values[i]} and {values[j]}" for i, j in told_apart(every)) or "none"
    return [
        title,
        f"{original}: the means of {', '.join(values)} {results.entry.axis} are "
        f"{apart:.{digits}f} apart, and no two are further apart than {within(every):.{digits}f} "
        f"(90%, Tukey's test, {min(map(len, every))} seeds). Pairs that differ, at the 5% level: {pairs}.",
        table(["left out", "seeds", "makes the range wider by", "p", "p, corrected"], rows),
        "p: of all ways to swap runs between the ablation and all adjustments, within each size, how many widen the "
        "range as much. One-sided; corrected by Holm's method.",
    ]


def differences(results, names, pairs, columns, digits=3):
    """A table: by how much the first setting is above the second, at the end and over the whole run."""
    rows = []
    for cells, first, second in pairs:
        for column in columns:
            strata = strata_of(results.final(*first, column), results.final(*second, column))
            cells += difference_cells(strata, digits) if strata else ["", "no runs"]
        rows.append(cells)
    return table([*names, "at the end", "95% interval", "over the whole run", "95% interval"], rows)


def same_age(results, variants):
    """The largest batch size, with a proximal policy as young as a smaller one's that is not adjusted."""
    first, second = variants
    pairs = [([size], (first, size), (second, size)) for size in results.values(second)]
    columns, unit, digits = measures_of(results)
    says = (
        f"{second}: the largest batch size, with a proximal policy as young, in environment steps, as that of this "
        "many environments without the adjustment."
    )
    shown = differences(results, [results.entry.axis], pairs, columns, digits)
    return [f"## {first} minus {second}, {unit}", shown, says] if pairs else []


def largest_minus_smallest(results, variants):
    """The difference between the largest and the smallest batch: the degree of invariance."""
    pairs = []
    for variant in filter(results.values, variants):
        largest, smallest = results.values(variant)[0], results.values(variant)[-1]
        pairs.append(([variant, f"{largest} minus {smallest}"], (variant, largest), (variant, smallest)))
    shown = differences(results, ["variant", results.entry.axis], pairs, MEASURES.values())
    return ["## Largest minus smallest batch size, normalised return", shown]


def bands(results, names):
    """On a grid of two flags: does their product decide? What does doubling either of them do?"""
    columns, unit, digits = measures_of(results)
    cells = list(dict.fromkeys(results.all_rows[["variant", "value"]].itertuples(index=False, name=None)))
    flags = np.array([[float(name.split("-")[-1]) for name in cell] for cell in cells])
    products, ratios = (list(x) for x in (flags.prod(axis=1), flags[:, 0] / flags[:, 1]))
    corner = max((n for n, x in enumerate(products) if x == products[0]), key=lambda n: flags[n, 0])
    fit = np.linalg.pinv(np.column_stack([np.ones(len(cells)), np.log2(flags)]))  # a plane through the cells' means

    of_product, of_ratio = (functools.partial(share_between, groups) for groups in (products, ratios))

    def slope(weights, *samples, axis=-1):
        return np.tensordot(weights, np.stack([x.mean(axis=axis) for x in samples]), 1)

    age, penalty = names
    statistics = {
        "share of the variance: product": of_product,
        "share of the variance: ratio": of_ratio,
        "product minus ratio": lambda *samples, axis=-1: (
            of_product(*samples, axis=axis) - of_ratio(*samples, axis=axis)
        ),
        f"doubling the {penalty}, {unit}": functools.partial(slope, fit[1]),
        f"doubling the {age}, {unit}": functools.partial(slope, fit[2]),
        "the former minus the latter": functools.partial(slope, fit[1] - fit[2]),
    }
    rows = [[name] for name in [*statistics, f"corner minus default, {unit}"]]
    for column in columns:
        samples = [results.over_seeds(*cell, column) for cell in cells]
        if min(map(len, samples)) < 2:
            rows = [[*row, "", "needs two seeds"] for row in rows]
            continue
        for row, statistic in zip(rows, statistics.values(), strict=False):
            row += [f"{statistic(*samples):.2f}", between(bootstrap_interval(samples, statistic), 2)]
        rows[-1] += difference_cells([(samples[corner], samples[0])], digits)
    return [
        f"## Does the product of {' and '.join(names)} decide?",
        table(["", "at the end", "95% interval", "over the whole run", "95% interval"], rows),
        "Share of the variance: how much of the variance of all runs lies between groups of cells that have the same "
        "product, or ratio. Doubling: by a plane through the cells' means; if the product decides, the two are the "
        "same. Corner: the cell at the far end of the diagonal that begins at the default.",
    ]


TESTS = {x.__name__: x for x in (better, table_5, apart, same, same_age, largest_minus_smallest, bands)}
