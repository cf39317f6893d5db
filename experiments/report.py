"""An experiment's numbers as Markdown: final returns with their intervals, and the tests between settings."""

import numpy as np
from catalogue import GAMES
from curves import final_window
from stats import how_far_apart, interquartile_mean, mean_difference, stratified_interval, van_elteren

LEVEL = 0.001  # the paper's level of significance, to be divided by the number of hypotheses


def report(results, caption):
    total = results.runs[0].flags["total-timesteps"]
    parts = [
        f"# {results.experiment}, scale {results.runs[0].scale}",
        caption,
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
    parts += TESTS.get(results.experiment, lambda _: [])(results)
    parts += ["## What section 6.2 of the paper looks at", signs(results), ABOUT_SIGNS]
    return "\n\n".join(parts) + "\n"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def overview(results, column):
    """Returns as the game gives them: a line for each variant and game, a column for each setting."""
    returns = results.rows.dropna(subset=["final_return"]).set_index(["variant", "game", "value"])[column]
    variants = list(dict.fromkeys(results.all_rows["variant"]))
    columns, rows = max(map(results.values, variants), key=len), []
    for variant, game in [(x, y) for x in variants for y in results.games]:
        named = len(variants) > 1 and variant != "algorithms"  # whose values say enough
        name = ", ".join([variant] * named + [game] * (len(results.games) > 1)) or game
        samples = [returns[returns.index == (variant, game, value)] for value in columns]
        rows.append(
            [name, *(f"{x.mean():.2f} ± {x.std():.2f}".replace(" ± nan", "") if len(x) else "" for x in samples)]
        )
    corner = {"staleness": "staleness", "ewma": "", "com-vs-kl": ""}.get(results.experiment, "environments")
    return table([corner, *columns], rows)


def final_returns(results):
    rows, variants = [], dict.fromkeys(results.all_rows["variant"])
    for variant, value in [(x, y) for x in variants for y in results.values(x)]:
        samples = [np.array(list(x.values())) for x in results.final(variant, value).values()]
        if samples:
            seeds = results.over_seeds(variant, value)
            std = f"{np.std(seeds, ddof=1):.3f}" if len(seeds) > 1 else "one seed"
            mean = np.mean([sample.mean() for sample in samples])
            iqm, interval = interquartile_mean(*samples), between(stratified_interval(samples))
            number = sum(map(len, samples))
            rows.append([variant, value, f"{mean:.3f}", std, f"{iqm:.3f}", interval, number])
    return table(["variant", "setting", "mean", "std over seeds", "IQM", "interval of the IQM", "runs"], rows)


ABOUT_SIGNS = (
    "Medians over runs. Clipped ratios: in the second half of a run; with one epoch, 1% to 10% is usual. Swing: by "
    "what factor the standard deviation that advantages are divided by goes up and down within a tenth of a run; under "
    "10 is fine."
)


def signs(results):
    rows = []
    for (variant, value), runs in results.all_rows.groupby(["variant", "value"], sort=False):
        clipped, swing = (runs[column].dropna().median() for column in ("clip_fraction", "advantage_swing"))
        cells = [
            "no clipping" if np.isnan(clipped) else f"{clipped:.2%}",
            "too few" if np.isnan(swing) else f"{swing:.1f}",
        ]
        rows.append([variant, value, *cells])
    return table(["variant", "setting", "clipped ratios", "swing of advantages"], rows)


def between(interval, digits=3):
    return "needs two seeds" if interval is None else " to ".join(f"{x:.{digits}f}" for x in interval)


def strata_of(first, second):
    """Pairs of samples, for the games that both have."""
    return [
        (list(first[game].values()), list(second[game].values())) for game in GAMES if game in first and game in second
    ]


def differences(larger, smaller):
    """By how much the larger batch is better, {game: {seed: difference}}, for the seeds that both have."""
    games = {
        game: {seed: larger[game][seed] - smaller[game][seed] for seed in larger[game] if seed in smaller[game]}
        for game in larger
        if game in smaller
    }
    return {game: seeds for game, seeds in games.items() if seeds}


def cell(test, effect, hypotheses):
    """Effect size and Z, in bold if significant after Bonferroni correction."""
    text = f"{effect:.3f} ({test.z:.2f})"
    return f"**{text}**" if test.p < LEVEL / hypotheses else text


def footnote(tests, hypotheses):
    """What the tests are, and what they could show at best."""
    highest = max((test.highest_z for test in tests), default=0)
    return (
        f"Z: van Elteren test, games as strata, one-sided. Significant means p below {LEVEL:g}/{hypotheses}: "
        f"the {LEVEL:.1%} level after Bonferroni correction for {hypotheses} hypotheses. "
        f"With these games and seeds Z is {highest:.2f} at most."
    )


def batch_size_tests(results):
    ablations = ["no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]
    return [
        *apart(results, ["all", *ablations]),
        *same_age(results),
        *table_5(results, ablations, "final normalised return", "final_normalised_return"),
        *table_5(results, ablations, "over the whole run", "mean_normalised_return"),
        *between_sizes(results, ["all", *ablations]),
    ]


def table_5(results, ablations, measure, column):
    """Is the difference between the largest and a smaller batch larger for the ablation?"""
    sizes = results.settings("all")
    hypotheses, tests, rows = len(ablations) * (len(sizes) - 1), [], []
    for size in sizes[1:]:
        row = [size]
        original = differences(results.final("all", sizes[0], column), results.final("all", size, column))
        for ablation in ablations:
            ablated = differences(results.final(ablation, sizes[0], column), results.final(ablation, size, column))
            strata = strata_of(ablated, original)
            if not strata:
                row.append("no runs")
                continue
            tests.append(van_elteren(strata))
            effect = np.mean([np.mean(a) - np.mean(b) for a, b in strata])
            row.append(cell(tests[-1], effect, hypotheses))
        rows.append(row)
    return [
        f"## Hypothesis tests (the paper's table 5), {measure}",
        table(["environments", *ablations], rows),
        "By how much the ablation widens the gap to the largest batch size, and Z in parentheses; bold if significant. "
        + footnote(tests, hypotheses),
    ]


def measures_of(results):
    """Columns for the end and for the whole run, what to call them, digits: of one game, the return as it gives it."""
    unit, digits = ("return", 2) if len(results.games) == 1 else ("normalised return", 3)
    return [f"{when}_{unit.replace(' ', '_')}" for when in ("final", "mean")], unit, digits


def apart(results, variants):
    """Do the curves coincide? How far apart all batch sizes are, and if chance alone would do that."""
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


def same_age(results):
    """The largest batch size, with a proximal policy as young as a smaller one's that is not adjusted."""
    rows, (columns, unit, digits) = [], measures_of(results)
    for size in results.values("same-age"):
        settings, cells = [("no-ewma-adjustment", size), ("same-age", size)], []
        for column in columns:
            strata = strata_of(*(results.final(*setting, column) for setting in settings))
            cells += difference_cells(strata, digits) if strata else ["", "no runs"]
        rows.append([size, *cells])
    header = ["environments", "at the end", "95% interval", "over the whole run", "95% interval"]
    return [f"## no-ewma-adjustment minus same-age, {unit}", table(header, rows), SAME_AGE] if rows else []


SAME_AGE = (
    "same-age: the largest batch size, with a proximal policy as young, in environment steps, as that of so many "
    "environments without the adjustment."
)


def between_sizes(results, variants):
    """The difference between the largest and the smallest batch: the degree of invariance."""
    rows = []
    for variant in filter(results.values, variants):
        sizes = results.values(variant)
        measures = [
            strata_of(*(results.final(variant, size, f"{column}_normalised_return") for size in (sizes[0], sizes[-1])))
            for column in ("final", "mean")
        ]
        if measures[0]:
            cells = [cell for strata in measures for cell in difference_cells(strata)]
            rows.append([variant, f"{sizes[0]} minus {sizes[-1]}", *cells])
    header = ["variant", "environments", "at the end", "95% interval", "over the whole run", "95% interval"]
    return ["## Largest minus smallest batch size, normalised return", table(header, rows)]


def difference_cells(strata, digits=3):
    samples = [np.array(a) for a, _ in strata] + [np.array(b) for _, b in strata]
    interval = stratified_interval(samples, mean_difference)
    return f"{mean_difference(*samples):.{digits}f}", between(interval, digits)


def comparisons(results, title, pairs, column="final_normalised_return"):
    """Is the first better? pairs: (name, name, [(setting, setting), ...]); several such are strata of one test."""
    rows, tests = [], []
    for first, second, settings in pairs:
        strata = [x for pair in settings for x in strata_of(*(results.final(*setting, column) for setting in pair))]
        if strata:
            tests.append(van_elteren(strata))
            rows.append([first, second, *difference_cells(strata), tests[-1]])
    for row in rows:
        test = row[-1]
        row[-1:] = [
            f"{test.z:.2f} of {test.highest_z:.2f}",
            f"{test.p:.2g}",
            "yes" if test.p < LEVEL / len(tests) else "no",
        ]
    header = ["better?", "than", "mean difference", "95% interval", "Z, and its highest", "p", "significant"]
    return [f"## {title}", table(header, rows), footnote(tests, max(1, len(tests)))]


def staleness_tests(results):
    """At each staleness, and at all of them together, which are then strata as games are."""
    ages, pairs = [age for age in results.values("decoupled") if age != "0"], []
    for other in ("recent", "behavior"):
        settings = [(("decoupled", age), (other, age)) for age in ages]
        pairs += [(f"decoupled {age}", f"{other} {age}", [x]) for age, x in zip(ages, settings, strict=True)]
        pairs += [("decoupled", f"{other}, all ages", settings)] * (len(ages) > 1)
    return [
        *comparisons(results, "Does decoupling help? Final normalised return", pairs),
        *comparisons(results, "Does decoupling help? Over the whole run", pairs, "mean_normalised_return"),
    ]


def ewma_tests(results):
    settings = {base: (("algorithms", f"{base}-ewma"), ("algorithms", base)) for base in ("ppo", "ppg")}
    pairs = [(f"{base}-ewma", base, [setting]) for base, setting in settings.items()]
    young = ("as-old-as-ppo", "ppo-ewma")
    pairs += [(" ".join(reversed(young)), base, [(young, ("algorithms", base))]) for base in ("ppo", "ppo-ewma")]
    return [
        *comparisons(results, "Does EWMA help? Final normalised return", pairs),
        *comparisons(results, "Does EWMA help? Over the whole run", pairs, "mean_normalised_return"),
    ]


TESTS = {
    "staleness": staleness_tests,
    "batch-size": batch_size_tests,
    "ewma": ewma_tests,
    "linear-lr": lambda results: between_sizes(results, ["linear"]),
    "adam-betas": lambda results: between_sizes(results, ["none", "beta2", "both"]),
}
