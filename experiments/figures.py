"""Draw an experiment of the paper from its runs, finished or still running; draw any runs; or advise on them.

python experiments/figures.py batch-size             figures (PNG, SVG), numbers (CSV), tables and tests (Markdown)
python experiments/figures.py curves PPO="runs/*__ppo__*" EWMA="runs/*__ppo_ewma__*"
                                                     learning curves of runs of any script: figure, numbers, table
python experiments/figures.py advice runs/RUN ...    section 6.2 of the paper, applied to runs of any script
"""

import argparse
import glob
import sys
import textwrap
from pathlib import Path

try:
    import matplotlib
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
    from advice import advise
    from catalogue import EXPERIMENTS, SCALES, runs_of
    from curves import RETURN, Results, final_window, find_runs, read_scalars, return_range
    from matplotlib.ticker import EngFormatter, MaxNLocator
    from report import report
except ImportError as error:
    print(f"figures.py: error: {error}; pip install -r experiments/requirements.txt", file=sys.stderr)
    sys.exit(2)

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"]  # Okabe and Ito's: colour-blind safe
ALGORITHMS = {"ppo": "PPO", "ppo-ewma": "PPO-EWMA", "ppg": "PPG", "ppg-ewma": "PPG-EWMA"}
TITLES = {
    "decoupled": "decoupled objective",
    "behavior": "behaviour policy for both",
    "recent": "recent policy for both",
    "all": "all adjustments",
    "no-step-size": "no step size adjustment",
    "no-adv-norm": "no adv. norm. adjustment",
    "no-ewma-adjustment": "no EWMA adjustment",
    "no-ewma": "no EWMA at all",
    "same-age": "64 env., average as young as that",
    "ppg-ewma": "PPG-EWMA, all adjustments",
    "linear": "linear step size rule",
    "none": "betas not adjusted",
    "beta2": r"$\beta_2$ adjusted",
    "both": r"$\beta_1$ and $\beta_2$ adjusted",
    "algorithms": "all four algorithms",
}
DIFFERENCES = {  # flags that a figure names where they are not the paper's
    "script": "scripts",
    "total-timesteps": "steps",
    "distribution-mode": "mode",
    "num-levels": "levels",
    "num-envs": "environments",
    "num-steps": "steps of a rollout",
    "channels": "channels",
    "epochs": "PPO epochs",
    "arch": "PPG network",
    "aux-epochs": "auxiliary epochs",
}
WIDTH = 6.75  # inches: the text of a paper; in dots, enough for a README
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "figure.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.title_fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "experiments",  # the same runs give the same file
}


def fail(message):
    print(f"figures.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# What is said under a figure.


def caption_of(results, spread="mean and standard deviation"):
    run, games = results.runs[0], results.games
    levels = run.flags["num-levels"]
    seeds = f"{spread} over {len(results.seeds)} seeds"
    if len(results.seeds) == 1:
        seeds = "one seed, so there are no error bars"
    words = [
        f"Games: {'all 16' if len(games) == 16 else ', '.join(games)};",
        f"{run.flags['distribution-mode']} mode, {levels or 'all'} level{'s' * (levels != 1)};",
        f"{run.flags['total-timesteps']:,} environment steps; {seeds}.",
    ]
    if results.finished < len(results.runs):
        words.append(f"{len(results.runs) - results.finished} of {len(results.runs)} runs are not finished.")
    if run.scale != "paper":
        words.append(f"Shrunk (in brackets: the paper): {shrunk(results)}.")
    return " ".join(words)


def shrunk(results):
    """What is not as in the paper's runs, in words."""
    paper = runs_of(results.experiment, "paper")
    differences = [("games", len(results.games), len({run.game for run in paper}))]
    differences.append(("seeds", len(results.seeds), len({run.seed for run in paper})))
    for flag, what in DIFFERENCES.items():
        mine, theirs = (settings_of(runs, flag) for runs in (results.runs, paper))
        if mine and theirs:
            differences.append((what, mine, theirs))
    return ", ".join(f"{what} {mine} ({theirs})" for what, mine, theirs in differences if mine != theirs)


def settings_of(runs, flag):
    """All settings of a flag in some runs, in a few words."""
    found = {run.script if flag == "script" else run.flags.get(flag) for run in runs if flag != "channels"}
    if flag == "channels":
        found = {"-".join(map(str, run.flags[flag])) for run in runs}
    if flag == "num-levels":
        found = {x or "all" for x in found}
    found = sorted(found - {None})
    if len(found) > 2 and flag != "script":
        found = [f"{found[0]} to {found[-1]}"]
    return " and ".join(f"{x:,}" if isinstance(x, int) else str(x) for x in found)


def save(figure, folder, name, says, results, **caption):
    """Write a figure as PNG and SVG, with a caption underneath."""
    lines = textwrap.wrap(f"{says} {caption_of(results, **caption)}", int(19.5 * figure.get_figwidth()))
    figure.text(0.01, -0.01, "\n".join(lines), fontsize=7, color="0.3", va="top")
    figure.savefig(folder / f"{name}.png", bbox_inches="tight", pad_inches=0.06)
    figure.savefig(folder / f"{name}.svg", bbox_inches="tight", pad_inches=0.06, metadata={"Date": None})
    plt.close(figure)
    print(f"{folder / name}.png, .svg")


# The kinds of panels.


def colours_of(results, values):
    """Algorithms get colours of their own; numbers go from dark to light, which survives grey print, too."""
    if results.experiment == "ewma":
        return dict(zip(ALGORITHMS, COLOURS, strict=False))
    return dict(zip(values, plt.cm.viridis(np.linspace(0, 0.88, max(2, len(values)))), strict=False))


def draw_curves(axes, results, variant, colours, column="normalised_return", game=None, **look):
    """A curve for each setting: the mean over games, and over seeds mean and standard deviation."""
    table = results.points[results.points["variant"] == variant]
    if game:
        table = table[table["game"] == game]
    for value in results.values(variant):
        runs = table[table["value"] == value].pivot_table(index="step", columns=["game", "seed"], values=column)
        runs = runs.dropna().T  # at steps that all runs have reached
        mean, seeds = runs.groupby("game").mean().mean(), runs.groupby("seed").mean()
        look = {"marker": "." if len(mean) == 1 else ""} | look  # a run that has just begun is a point
        style = {"label": ALGORITHMS.get(value, value), "ls": "--" if value in ("ppo", "ppg") else "-"} | look
        axes.plot(mean.index, mean, color=colours[value], **style)
        if len(seeds) > 1:
            low, high = seeds.mean() - seeds.std(), seeds.mean() + seeds.std()
            axes.fill_between(mean.index, low, high, color=colours[value], alpha=0.15, linewidth=0)
    steps_axis(axes, results)


def steps_axis(axes, results, ticks=4):
    axes.set_xlim(0, results.runs[0].flags["total-timesteps"])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(ticks))


def right_axis(axes, results):
    """With one game, the return itself on the right: far from the game's maximum it says more."""
    if len(results.games) == 1:
        low, high = return_range(results.runs[0])
        there, back = (lambda y: low + y * (high - low)), (lambda y: (y - low) / (high - low))
        right = axes.secondary_yaxis("right", functions=(there, back))
        right.set_ylabel("return")
        right.spines["right"].set_visible(False)


def panels_of_curves(results, variants, rows, columns, figure):
    """A panel for each variant, on the same scale."""
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = colours_of(results, max(map(results.settings, variants), key=len))
    for axes, variant, letter in zip(panels.flat, variants, "abcdefgh", strict=False):
        draw_curves(axes, results, variant, colours)
        axes.set_title(f"({letter}) {TITLES[variant]}" if len(variants) > 1 else TITLES[variant])
    for axes in panels.flat[len(variants) :]:
        axes.set_axis_off()
    for axes in [row[-1] for row in panels if row[-1].axison]:
        right_axis(axes, results)
    for column in panels.T:
        [axes for axes in column if axes.axison][-1].tick_params(labelbottom=True)
    for axes in panels[-1]:
        axes.set_xlabel("environment steps")
    figure.supylabel("normalised return" + (", mean over games" if len(results.games) > 1 else ""))
    return panels, colours


def draw_summary(pair, letters, results, variants, values, looks=None):
    """Two panels with a line for each variant, over its settings: returns at the end, and over the whole run.

    variants: {variant: its name}. looks: {variant: how its line differs}.
    """
    for axes, letter, title, column in zip(
        pair, letters, ("at the end of training", "over the whole run"), ("final", "mean"), strict=True
    ):
        places = min(0.1, 0.5 / len(variants)) * (np.arange(len(variants)) - (len(variants) - 1) / 2)  # side by side
        for (variant, name), colour, marker, aside in zip(variants.items(), COLOURS, "osv^D^", places, strict=False):
            seeds = [results.over_seeds(variant, value, f"{column}_normalised_return") for value in values]
            mean = [x.mean() if len(x) else np.nan for x in seeds]
            std = [x.std(ddof=1) if len(x) > 1 else 0 for x in seeds]
            x = np.arange(len(values)) + aside
            look = {"color": colour} | (looks or {}).get(variant, {})
            axes.errorbar(x, mean, std, marker=marker, ms=4, capsize=2, label=name, **look)
        axes.set_xticks(range(len(values)), values)
        axes.set_title(f"({letter}) {title}")


def legend_above(figure, axes, results):
    handles, labels = axes.get_legend_handles_labels()
    title = {"staleness": "staleness (iterations)", "ewma": None}.get(results.experiment, "environments")
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=len(labels))


def draw_bars(axes, results, groups, colours=COLOURS):
    """Differences of final normalised returns: a group of bars for each comparison, in it a bar for each game.

    groups: {name: (setting, setting)}, the first minus the second. Standard errors; square-root scale, as in fig. 3.
    """
    width = 0.8 / len(results.games)
    for place, (colour, pair) in enumerate(zip(colours, groups.values(), strict=False)):
        first, second = (results.final(*setting) for setting in pair)
        for number, game in enumerate(results.games):
            samples = [np.array(list(final.get(game, {}).values())) for final in (first, second)]
            if min(map(len, samples)) == 0:
                continue
            error = None
            if min(map(len, samples)) > 1:
                error = np.sqrt(sum(sample.var(ddof=1) / len(sample) for sample in samples))
            x, y = place - 0.4 + width * (number + 0.5), samples[0].mean() - samples[1].mean()
            axes.bar(x, y, 0.9 * width, yerr=error, color=colour, error_kw={"linewidth": 0.8, "capsize": 2})
    axes.set_xticks(range(len(groups)), groups)
    if 1 < len(results.games) <= 4:  # there is room for their names
        places = [place - 0.4 + width * (n + 0.5) for place in range(len(groups)) for n in range(len(results.games))]
        axes.xaxis.remove_overlapping_locs = False  # those in the middle
        look = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 7}
        axes.set_xticks(places, results.games * len(groups), minor=True, **look)
        axes.tick_params(axis="x", which="minor", length=0)
        axes.tick_params(axis="x", which="major", length=0, pad=6 + 3 * max(map(len, results.games)))
    axes.set_yscale("function", functions=(lambda y: np.sign(y) * np.sqrt(np.abs(y)), lambda y: np.sign(y) * y**2))
    low, high = axes.get_ylim()
    ticks = [x for x in (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1, 2) if x > max(-low, high) / 40]
    axes.set_yticks([x for x in (*(-x for x in reversed(ticks)), 0, *ticks) if low <= x <= high])
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.grid(axis="x", visible=False)


def draw_by_game(results, variants, folder):
    """A figure for each variant, with a panel for each game (fig. 7-12, 14-17)."""
    for variant in variants if len(results.games) > 1 else []:
        figure, panels = panels_of_games(results)
        colours = colours_of(results, results.values(variant))
        for axes, game in zip(panels.flat, results.games, strict=False):
            draw_curves(axes, results, variant, colours, column="return", game=game)
            steps_axis(axes, results, ticks=2 if len(results.games) > 3 else 4)
        figure.supylabel("return")
        legend_above(figure, panels[0, 0], results)
        title = TITLES[variant]
        says = f"{title[0].upper() + title[1:]}: each game by itself."
        save(figure, folder, f"{results.experiment}_by_game_{variant}", says, results)


def panels_of_games(results, **options):
    columns = min(4, len(results.games))
    rows = -(-len(results.games) // columns)
    size = (WIDTH, 0.9 + (1.3 if rows > 1 else 1.7) * rows)
    figure, panels = plt.subplots(
        rows, columns, figsize=size, sharex=True, squeeze=False, layout="constrained", **options
    )
    for axes, game in zip(panels.flat, results.games, strict=False):
        axes.set_title(game)
    for axes in panels.flat[len(results.games) :]:
        axes.set_axis_off()
    figure.supxlabel("environment steps")
    return figure, panels


def about_bars(results):
    window = final_window(results.runs[0].steps)
    order = f" Bars from left to right: {', '.join(results.games)}." if len(results.games) > 4 else ""
    return f"over the last {window:,} steps, on a square-root scale.{order}"


# The experiments.


def draw_staleness(results, folder):
    losses, ages = ["recent", "decoupled", "behavior"], results.settings("decoupled")
    figure, panels = plt.subplot_mosaic("aabbcc;dddeee", figsize=(WIDTH, 4.6), sharey=True, layout="constrained")
    colours = colours_of(results, ages)
    for letter, loss in zip("abc", losses, strict=True):
        draw_curves(panels[letter], results, loss, colours)
        panels[letter].set(title=f"({letter}) {TITLES[loss]}", xlabel="environment steps")
    draw_summary([panels["d"], panels["e"]], "de", results, {x: TITLES[x].split()[0] for x in losses}, ages)
    for letter in "de":
        panels[letter].set_xlabel("staleness (iterations)")
    for letter in "bce":
        panels[letter].tick_params(labelleft=False)
    for letter in "ce":
        right_axis(panels[letter], results)
    panels["e"].legend()
    figure.supylabel("normalised return" + (", mean over games" if len(results.games) > 1 else ""))
    legend_above(figure, panels["a"], results)
    iteration = results.runs[0].flags["num-envs"] * results.runs[0].flags["num-steps"]
    says = f"PPO on data made stale on purpose (paper's fig. 1). One iteration is {iteration:,} environment steps."
    save(figure, folder, "staleness", says, results)
    draw_by_game(results, losses, folder)


def draw_batch_size(results, folder):
    variants = ["all", "no-step-size", "no-adv-norm", "no-ewma-adjustment", "no-ewma"]
    with_ppg = bool(results.values("ppg-ewma"))
    figure = plt.figure(figsize=(WIDTH, 6.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.9, 1])
    panels, colours = panels_of_curves(results, variants + ["ppg-ewma"] * with_ppg, 2, 3, above)
    grey = {value: "0.45" for value in results.values("floor")}
    draw_curves(panels[0, 0], results, "floor", grey, ls=":", label="KL penalty 1/256")
    if results.values("ppg-ewma-no-n-pi"):
        draw_curves(panels[1, 2], results, "ppg-ewma-no-n-pi", colours, ls="--", label=r"$N_\pi$ not adjusted")
        panels[1, 2].legend(*([x[-1]] for x in panels[1, 2].get_legend_handles_labels()))
    legend_above(above, panels[0, 0], results)
    sizes = results.settings("all")
    names = {x: TITLES[x].replace(" adjustments", "").replace("adjustment", "adj.") for x in variants}
    left, right = below.subplots(1, 2, sharey=True)
    if results.values("same-age"):
        names["same-age"] = TITLES["same-age"]
    looks = {"same-age": {"color": COLOURS[variants.index("no-ewma-adjustment")], "ls": "--", "mfc": "white"}}
    draw_summary([left, right], "gh" if with_ppg else "fg", results, names, sizes, looks)
    left.set(xlabel="environments", ylabel="normalised return")
    right.set_xlabel("environments")
    right_axis(right, results)
    columns = len(names) if len(names) < 6 else 3
    below.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=columns, columnspacing=1.2)
    says = (
        f"{algorithm_of(results)} at different batch sizes, with all adjustments and with all but one (paper's fig. 2)."
    )
    says += " Dotted: without EWMA, at the largest batch size, with a KL penalty too weak: a floor."
    if "same-age" in names:
        says += f" Hollow: {sizes[0]} environments, an average as young in environment steps as with filled ones."
    save(figure, folder, "batch-size", says, results)
    draw_by_game(results, variants, folder)

    figure, axes = plt.subplots(figsize=(WIDTH, 2.8), layout="constrained")
    names = [TITLES[variant].replace(" adjustment", "\nadjustment") for variant in variants]
    draw_bars(axes, results, {name: ((x, sizes[0]), (x, sizes[-1])) for name, x in zip(names, variants, strict=True)})
    axes.set_ylabel(f"normalised return,\n{sizes[0]} minus {sizes[-1]} environments")
    says = f"Difference between the largest and the smallest batch size (paper's fig. 3), {about_bars(results)}"
    save(figure, folder, "batch-size_difference", says, results, spread="mean and standard error")
    if results.runs_dir:  # the tables do not have what this shows
        draw_advantage_std(results, colours, folder)


def draw_advantage_std(results, colours, folder):
    """Fig. 13: how much the estimates swing. No smoothing, which would hide it."""
    shown = [x for x in results.runs if x.variant == "no-adv-norm"]
    if not shown:
        return
    shown = [x for x in results.runs if x.variant == "all" and x.value == results.settings("all")[0]] + shown
    figure, panels = panels_of_games(results, sharey=True)
    table, seed, tag = [], min(x.seed for x in shown), "advantage/std_used"
    for axes, game in zip(panels.flat, results.games, strict=False):
        for run in reversed(shown):  # smallest batch first, which swings most and would cover the others
            if run.game == game and run.seed == seed:
                curve = read_scalars(run.folder(results.runs_dir), [tag])[0][tag]
                curve = curve[:: len(curve) // 1000 + 1]
                axes.plot(*curve.T, color=colours[run.value], label=run.value, linewidth=0.8)
                table += [(game, run.value, seed, int(step), std) for step, std in curve]
        axes.set_yscale("log")
        steps_axis(axes, results, ticks=2 if len(results.games) > 3 else 4)
    figure.supylabel("standard deviation of advantages")
    legend_above(figure, panels[0, 0], results)
    says = (
        "The estimates that advantages are divided by, when this is not adjusted to the batch size (paper's fig. 13),"
    )
    save(figure, folder, "batch-size_advantage_std", f"{says} not smoothed.", results, spread=f"seed {seed}, one")
    write_csv(
        pd.DataFrame(table, columns=["game", "value", "seed", "step", "std"]), folder / "batch-size_advantage_std.csv"
    )


def draw_ewma(results, folder):
    """Curves and gains; above them the curves of each game, if they are few."""
    games = results.games if 1 < len(results.games) <= 4 else []
    colours, letters = colours_of(results, None), list("abcdef"[: len(games) + 2])
    figure = plt.figure(figsize=(WIDTH, 5 if games else 2.9), layout="constrained")
    *above, below = figure.subfigures(1 + bool(games), 1, squeeze=False).flat
    for part in above:
        for axes, letter, game in zip(part.subplots(1, len(games)), letters, games, strict=False):
            draw_curves(axes, results, "algorithms", colours, column="return", game=game)
            axes.set(title=f"({letter}) {game}", xlabel="environment steps", ylabel="return" * (letter == "a"))
    left, right = below.subplots(1, 2, width_ratios=[1.15, 1])
    draw_curves(left, results, "algorithms", colours)
    title = "mean over games" if len(results.games) > 1 else "learning curves"
    left.set(title=f"({letters[-2]}) {title}", xlabel="environment steps", ylabel="normalised return")
    if results.values("algorithms"):
        left.legend()
    right_axis(left, results)
    groups = {f"{ALGORITHMS[x]}-EWMA\nminus {ALGORITHMS[x]}": [f"{x}-ewma", x] for x in ("ppo", "ppg")}
    groups = {name: [("algorithms", x) for x in pair] for name, pair in groups.items()}
    if results.values("as-old-as-ppo"):
        groups["as old as PPO's,\nminus PPO"] = [("as-old-as-ppo", "ppo-ewma"), ("algorithms", "ppo")]
    draw_bars(right, results, groups, [colours["ppo-ewma"], colours["ppg-ewma"], COLOURS[4]])
    right.set(title=f"({letters[-1]}) gain from EWMA, by game", ylabel="normalised return")
    says = f"All four algorithms at the default batch size (paper's fig. 4). ({letters[-1]}) is {about_bars(results)}"
    if results.values("as-old-as-ppo"):
        says += " As old as PPO's: PPO-EWMA whose average is as old as PPO's old policy, 3.5 steps."
    if len(results.seeds) > 1:
        says += f" Error bars: standard deviation, in ({letters[-1]}) standard error."
    save(figure, folder, "ewma", says, results, spread="mean")
    if not games:
        draw_by_game(results, ["algorithms"], folder)


def draw_linear_lr(results, folder):
    figure = plt.figure(figsize=(WIDTH, 3), layout="constrained")
    panels, _ = panels_of_curves(results, ["linear"], 1, 1, figure)
    legend_above(figure, panels[0, 0], results)
    says = f"{algorithm_of(results)} with the step size divided by c, not by its square root (paper's fig. 5)."
    save(figure, folder, "linear-lr", says, results)
    draw_by_game(results, ["linear"], folder)


def draw_adam_betas(results, folder):
    variants = ["none", "beta2", "both"]
    figure = plt.figure(figsize=(WIDTH, 2.6), layout="constrained")
    panels, _ = panels_of_curves(results, variants, 1, 3, figure)
    legend_above(figure, panels[0, 0], results)
    says = f"{algorithm_of(results)} with Adam's betas adjusted besides everything else (paper's fig. 6)."
    save(figure, folder, "adam-betas", says, results)
    draw_by_game(results, variants, folder)


def draw_com_vs_kl(results, folder):
    number = lambda label: float(label.split("-")[1])  # noqa: E731
    kls, coms = (sorted(set(results.rows[column].map(number))) for column in ("variant", "value"))
    for game in results.games:
        finished = results.rows[results.rows["game"] == game].dropna(subset=["final_return"])
        cells = finished.pivot_table(
            index=finished["variant"].map(number), columns=finished["value"].map(number), values="final_return"
        ).reindex(index=kls, columns=coms)
        figure, axes = plt.subplots(figsize=(4.4, 3.3), layout="constrained")
        image = axes.imshow(cells, origin="lower", cmap="cividis", aspect="auto")
        middle = (cells.min(axis=None) + cells.max(axis=None)) / 2
        for (row, column), value in np.ndenumerate(cells):
            text = "" if np.isnan(value) else f"{value:.3g}"
            axes.text(column, row, text, ha="center", va="center", color="black" if value > middle else "white")
        axes.set_xticks(range(len(coms)), [f"{x:g}" for x in coms])
        axes.set_yticks(range(len(kls)), [f"{x:g}" for x in kls])
        axes.set(title=game, xlabel="centre of mass of the EWMA (--prox-com)", ylabel="KL penalty (--kl-coef)")
        axes.grid(visible=False)
        figure.colorbar(image, label="final return")
        c = results.runs[0].flags["reference-num-envs"]
        says = f"{algorithm_of(results)} with one environment: final return (paper's fig. 18). Default: bottom right."
        says += f" The centre of mass is stated for {c} environments; in use it is {c} times as long."
        name = "com-vs-kl" if len(results.games) == 1 else f"com-vs-kl_{game}"
        save(figure, folder, name, says, results, spread="mean")


def algorithm_of(results):
    return ALGORITHMS[results.runs[0].script.removesuffix(".py").replace("_", "-")]


DRAW = {
    "staleness": draw_staleness,
    "batch-size": draw_batch_size,
    "ewma": draw_ewma,
    "linear-lr": draw_linear_lr,
    "adam-betas": draw_adam_betas,
    "com-vs-kl": draw_com_vs_kl,
}


def write_csv(table, path, digits=6):
    table.to_csv(path, index=False, float_format=f"%.{digits}g")
    print(path)


def read_results(args):
    """What there is, from runs or from tables; says what is wrong with it."""
    if args.csv:
        try:
            return Results.of_csv(args.name, *args.csv)
        except (OSError, ValueError, KeyError, IndexError) as error:
            fail(f"--csv {' '.join(args.csv)}: has no tables of {args.name} that figures.py has written ({error})")
    runs, notes = find_runs(args.runs_dir, args.name, args.scale)
    started = [run for run in runs if run.folder(args.runs_dir).exists()]
    for note in notes:
        print(f"note: {note}")
    if not started:
        wanted = f"experiments/sweep.py {args.name}" + (f" --scale {args.scale}" if args.scale else "")
        fail(f"no runs of {args.name} found in {args.runs_dir}; {wanted} makes them")
    notes = []
    results = Results.of_runs(args.name, runs, args.runs_dir, notes)
    for note in notes:
        print(f"note: {note}")
    return results


def draw(args):
    results = read_results(args)
    runs = results.runs
    if results.points.empty:
        fail(f"no episode of {args.name} has ended in any run yet; try again later")
    if len(results.seeds) == 1:
        print("note: there is one seed only, so the figures have no error bars")
    if results.finished < len(runs):
        print(f"note: {results.finished} of {len(runs)} runs are finished; the figures show what there is")
    folder = Path(args.out or (args.csv or [Path(args.runs_dir, args.name, runs[0].scale, "figures")])[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            DRAW[args.name](results, folder)
        write_csv(results.all_points, folder / f"{args.name}.csv")
        write_csv(results.all_rows, folder / f"{args.name}_runs.csv", digits=17)  # to compute the same from them
        (folder / f"{args.name}.md").write_text(report(results, caption_of(results)))
        print(folder / f"{args.name}.md")
    except OSError as error:
        fail(f"{folder}: cannot be written ({error.strerror})")


def read_curves(label, pattern):
    """Learning curves as a table of label, run, step and return: of the runs that match, or out of such a file."""
    if pattern.endswith(".csv"):
        try:
            table = pd.read_csv(pattern, comment="#").assign(label=label)
            return table[["label", "run", "step", "return"]].assign(measured=False)
        except (OSError, ValueError, KeyError) as error:
            fail(f"{label}={pattern}: cannot be read as a table of run, step and return ({error})")
    tables = []
    for folder in sorted(glob.glob(pattern)):
        scalars, damaged = read_scalars(folder, [RETURN])
        for name in damaged:
            print(f"note: {Path(folder, name)}: is damaged; showing what can be read of it")
        curve = scalars[RETURN]
        if len(curve):
            kept = curve[np.unique(np.linspace(0, len(curve) - 1, 200).round().astype(int))]
            columns = {"label": label, "run": Path(folder).name, "step": kept[:, 0], "return": kept[:, 1]}
            tables.append(pd.DataFrame(columns))
    if not tables:
        fail(f"{label}={pattern}: no run with a finished episode is there")
    return pd.concat(tables).assign(measured=True)


def draw_runs(args):
    """Learning curves of any runs: mean and range over those of a label; points out of a file as crosses."""
    for pair in args.curves:
        if "=" not in pair:
            fail(f"{pair}: must be LABEL=RUNS, the runs being a pattern of folders or a CSV file")
    table = pd.concat([read_curves(*pair.split("=", 1)) for pair in args.curves], ignore_index=True)
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
        for (label, group), colour in zip(table.groupby("label", sort=False), COLOURS, strict=False):
            if not group["measured"].all():
                axes.plot(group["step"], group["return"], "x", color="black", label=label, zorder=3)
                continue
            runs = group.pivot(index="step", columns="run", values="return").interpolate(limit_area="inside").dropna()
            number = runs.shape[1]
            axes.plot(runs.index, runs.mean(axis=1), color=colour, label=f"{label} ({number} run{'s' * (number != 1)})")
            axes.fill_between(runs.index, runs.min(axis=1), runs.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="environment steps", ylabel="return, last 100 episodes")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend()
        try:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(f"{args.out}.png")
            figure.savefig(f"{args.out}.svg", metadata={"Date": None})
            write_csv(table[table["measured"]].drop(columns="measured").astype({"step": int}), f"{args.out}.csv")
            Path(f"{args.out}.md").write_text(table_of_returns(table))
        except OSError as error:
            fail(f"--out {args.out}: cannot be written ({error.strerror})")
        plt.close(figure)
    print(f"{args.out}.png, .svg, .md")


def table_of_returns(table):
    """Return of every run at the steps of a file, or, without one, at quarters of the shortest run; and at its end."""
    given = sorted(set(table.loc[~table["measured"], "step"]))
    end = table[table["measured"]].groupby(["label", "run"])["step"].max().min()
    steps = given or [end * quarter // 4 for quarter in (1, 2, 3)]
    lines = [f"| | {' | '.join(f'{x:,.0f} steps' for x in steps)} | at the end |", "|---" * (2 + len(steps)) + "|"]
    for label, group in table.groupby("label", sort=False):
        runs = [run for _, run in group.groupby("run")]
        cells = [[np.interp(step, run["step"], run["return"], right=np.nan) for run in runs] for step in steps]
        cells.append([run["return"].iloc[-1] for run in runs])
        cells = [" / ".join(f"{x:.1f}" for x in cell if not np.isnan(x)) for cell in cells]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name in EXPERIMENTS:
        add = commands.add_parser(name, usage=argparse.SUPPRESS, help=f"draw the experiment {name}").add_argument
        add("--scale", choices=SCALES, help="default: the largest there is")
        add("--runs-dir", default="runs", help="as given to sweep.py; default: runs")
        help = "draw from the tables that earlier calls have written here, without runs; several are put together"
        add("--csv", metavar="FOLDER", nargs="+", help=help)
        add("--out", help="folder for the results; default: RUNS_DIR/NAME/SCALE/figures, or the first of --csv")
    help = "draw learning curves of any runs"
    add = commands.add_parser("curves", usage=argparse.SUPPRESS, help=help).add_argument
    add("curves", nargs="+", metavar="LABEL=RUNS", help="a pattern of run folders, or a CSV file (run, step, return)")
    add("--out", default="curves", help="path of the results, without the ending; default: curves")
    help = "advise on runs: clipping, epochs, advantage normalisation"
    add = commands.add_parser("advice", usage=argparse.SUPPRESS, help=help).add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run")
    return parser.parse_args()


def main():
    matplotlib.use("Agg")
    args = parse_args()
    if args.name == "curves":
        draw_runs(args)
        return
    if args.name != "advice":
        draw(args)
        return
    refused = 0
    for folder in args.runs:
        try:
            print("\n".join(advise(folder)))
        except ValueError as error:
            print(f"figures.py: error: {error}", file=sys.stderr)
            refused += 1
    sys.exit(2 if refused else 0)


if __name__ == "__main__":
    main()
