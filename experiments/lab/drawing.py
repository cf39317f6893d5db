"""Figures: the kinds that an experiment's entry may ask for, and what they are made of."""

import itertools
import string
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from lab.catalogue import ALGORITHMS
from lab.inference import bootstrap_interval, mean_difference
from lab.reporting import about, runs_shown
from lab.runs import final_window, write_csv

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"]  # Okabe and Ito's: colour-blind safe
WIDTH = 6.75  # inches: the text of a paper; in dots, enough for a README
STYLE = Path(__file__).with_name("style.mplstyle")
matplotlib.use("Agg")


def draw(results, folder):
    """All figures of an experiment."""
    with plt.rc_context(fname=STYLE):
        for kind, options in results.entry.figures.items():
            FIGURES[kind](results, folder, results.of_this_scale(options))


def save(figure, folder, name, *says):
    """Write a figure as PNG and SVG, with a caption of a few lines underneath."""
    lines = textwrap.wrap(" ".join(filter(None, says)), int(19.5 * figure.get_figwidth()))
    figure.text(0.01, -0.01, "\n".join(lines), fontsize=7, color="0.3", va="top")
    figure.savefig(folder / f"{name}.png", bbox_inches="tight", pad_inches=0.06)
    figure.savefig(folder / f"{name}.svg", bbox_inches="tight", pad_inches=0.06, metadata={"Date": None})
    plt.close(figure)
    print(f"{folder / name}.png, .svg")


# What figures are made of.


def label_of(results):
    return results.measure.replace("_", " ")


def settings_of(results):
    """The values of the experiment, in the catalogue's order."""
    return max(map(results.settings, results.entry.panels), key=len)


def colours_of(results):
    """Algorithms get colours of their own; numbers go from dark to light, which survives grey print, too."""
    values = settings_of(results)
    if set(values) <= set(ALGORITHMS):
        return dict(zip(ALGORITHMS, COLOURS, strict=False))
    return dict(zip(values, plt.cm.viridis(np.linspace(0, 0.88, max(2, len(values)))), strict=True))


def draw_curves(axes, results, variant, colours, column=None, game=None, **look):
    """A curve for each setting: the mean over games, and over seeds mean and standard deviation."""
    table = results.points[results.points["variant"] == variant]
    if game:
        table = table[table["game"] == game]
    for value in results.values(variant):
        runs = table[table["value"] == value]
        runs = runs.pivot_table(index="step", columns=["game", "seed"], values=column or results.measure)
        runs = runs.dropna().T  # at steps that all runs have reached
        mean, seeds = runs.groupby("game").mean().mean(), runs.groupby("seed").mean()
        style = {"label": ALGORITHMS.get(value, value), "ls": "--" if value in ("ppo", "ppg") else "-"}
        style |= {"marker": "." if len(mean) == 1 else "", "color": colours[value]}  # just begun: it is a point
        (line,) = axes.plot(mean.index, mean, **style | look)
        if len(seeds) > 1:
            low, high = seeds.mean() - seeds.std(), seeds.mean() + seeds.std()
            axes.fill_between(mean.index, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    steps_axis(axes, results.runs[0].flags["total-timesteps"])


def steps_axis(axes, total=None, ticks=4):
    axes.set_xlim(0, total)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(ticks))


def draw_lines(axes, results, lines, values, when, hollow):
    """A line for each variant, over its settings: returns at the end (final), or over the whole run (mean)."""
    places = min(0.1, 0.5 / len(lines)) * (np.arange(len(lines)) - (len(lines) - 1) / 2)  # side by side
    colours = dict(zip(lines, itertools.cycle(COLOURS), strict=False))
    for variant, marker, aside in zip(lines, itertools.cycle("osv^D^"), places, strict=False):
        seeds = [results.over_seeds(variant, value, f"{when}_{results.measure}") for value in values]
        mean = [x.mean() if len(x) else np.nan for x in seeds]
        std = [x.std(ddof=1) if len(x) > 1 else 0 for x in seeds]
        look = {"color": colours[variant], "label": results.entry.panels.get(variant)}
        if variant in hollow:
            like, label, _ = hollow[variant]
            look = {"color": colours[like], "label": label, "ls": "--", "mfc": "white"}
        axes.errorbar(np.arange(len(values)) + aside, mean, std, marker=marker, ms=4, capsize=2, **look)
    axes.set_xticks(range(len(values)), values)


def draw_bars(axes, results, groups, colours=COLOURS):
    """Differences of final returns, with 95% intervals: a group of bars for each comparison, a bar for each game.

    groups: {name: (setting, setting)}, the first minus the second.
    """
    column, width = f"final_{results.measure}", 0.8 / len(results.games)
    places = np.arange(len(results.games)) * width - 0.4 + width / 2
    for group, (colour, pair) in enumerate(zip(itertools.cycle(colours), groups.values(), strict=False)):
        finals = [results.final(*setting, column) for setting in pair]
        for place, game in zip(group + places, results.games, strict=True):
            samples = [final[final.index.get_level_values("game") == game].to_numpy() for final in finals]
            if min(map(len, samples)):
                difference, interval = mean_difference(*samples), bootstrap_interval(samples, mean_difference)
                error = None if interval is None else np.abs(np.reshape(interval, (2, 1)) - difference)
                look = {"yerr": error, "color": colour, "error_kw": {"linewidth": 0.8, "capsize": 2}}
                axes.bar([place], [difference], 0.9 * width, **look)
    axes.set_xticks(range(len(groups)), groups)
    if 1 < len(results.games) <= 4:  # there is room for their names
        axes.xaxis.remove_overlapping_locs = False  # those in the middle
        look = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 7}
        ticks = np.add.outer(range(len(groups)), places).ravel()
        axes.set_xticks(ticks, results.games * len(groups), minor=True, **look)
        axes.tick_params(axis="x", which="minor", length=0)
        axes.tick_params(axis="x", which="major", length=0, pad=6 + 3 * max(map(len, results.games)))
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.grid(axis="x", visible=False)


def about_bars(results):
    order = f" Bars: {', '.join(results.games)}." if len(results.games) > 4 else ""
    return f"over the last {final_window(results.runs[0].steps):,} steps, 95% intervals (bootstrap).{order}"


def legend_in(axes, title=None, skip=0, room=0.0, **look):
    """A legend in a panel, where it covers least; with this much more room above the curves."""
    handles, labels = axes.get_legend_handles_labels()
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + room * (high - low))
    axes.legend(handles[skip:], labels[skip:], title=title or None, borderaxespad=0.2, **look)


def rows_of_panels(*rows, height):
    """Panels by letter, in rows such as "abc" and "de"; a dot is an empty place."""
    figure = plt.figure(figsize=(WIDTH, 0.6 + height * len(rows)), layout="constrained")
    places = {}
    for letters, part in zip(rows, figure.subfigures(len(rows), 1, squeeze=False).flat, strict=True):
        for letter, axes in zip(letters, part.subplots(1, len(letters), squeeze=False).flat, strict=True):
            places[letter] = axes
            if letter == ".":
                axes.set_axis_off()
    return figure, places


def large_and_small(letters, summary):
    """The first panel large, the others small in two rows beside it; below them the summary's two, if any."""
    heights = [3.5, 1.95][: 1 + bool(summary)]
    figure = plt.figure(figsize=(WIDTH, 0.6 + sum(heights)), layout="constrained")
    above, *below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    left, right = above.subfigures(1, 2, width_ratios=[1, 1.25])
    places, columns = {letters[0]: left.subplots()}, len(letters) // 2
    for letter, axes in zip(letters[1:].ljust(2 * columns, "."), right.subplots(2, columns).flat, strict=True):
        places[letter] = axes
        axes.tick_params(labelsize=6)
        if letter == ".":
            axes.set_axis_off()
    for part in below:
        places |= dict(zip(summary, part.subplots(1, 2), strict=True))
    return figure, places


def share_returns(axes, *others):
    """The same axis of returns for several panels, wide enough for all, labelled at the first."""
    low, high = zip(*(x.get_ylim() for x in (axes, *others)), strict=True)
    axes.set_ylim(min(low), max(high))
    for other in others:
        other.sharey(axes)
        other.tick_params(labelleft=False)


def grid_of_panels(rows, columns, height, **options):
    options = {"squeeze": False, "layout": "constrained", "sharex": True} | options
    return plt.subplots(rows, columns, figsize=(WIDTH, 0.6 + height * rows), **options)


# The kinds of figures that an experiment's entry may ask for.


def curves(results, folder, options):
    """Learning curves, a panel for each variant; under them, if there are lines, a summary over the settings."""
    panels = {variant: title for variant, title in results.entry.panels.items() if results.settings(variant)}
    lines = [variant for variant in options.get("lines", []) if results.settings(variant)]
    beside, hollow = (
        {variant: x for variant, x in options.get(name, {}).items() if results.settings(variant)}
        for name in ("beside", "hollow")
    )
    letters, summary = string.ascii_lowercase[: len(panels)], string.ascii_lowercase[len(panels) :][: 2 * bool(lines)]
    if large := options.get("large"):
        figure, places = large_and_small(letters, summary)
    else:
        columns = min(3, len(panels))
        rows = [letters[start : start + columns].ljust(columns, ".") for start in range(0, len(panels), columns)]
        figure, places = rows_of_panels(*rows, *[summary] * bool(lines), height=1.95)
    draw_panels([places[letter] for letter in letters], results, panels, beside)
    for letter in letters[1:] if large else ():  # where space is short
        places[letter].set(title=places[letter].get_title().replace(" adj", "\nadj"), xlabel="")
    if lines:
        draw_summary([places[letter] for letter in summary], results, lines, hollow)
    for letter, axes in places.items():
        if len(places) > 1 and letter != ".":
            axes.set_title(f"({letter}) {axes.get_title()}")
    for letter in (letters[:1] if large else letters[::columns]) + summary[:1]:
        places[letter].set_ylabel(label_of(results) + ", mean over games" * (len(results.games) > 1))
        places[letter].tick_params(labelleft=True)
    for letter in letters[1 :: len(letters) // 2] if large else ():  # the small ones' rows begin with these
        places[letter].tick_params(labelleft=True)
    says = [says for *_, says in (*beside.values(), *hollow.values())]
    save(figure, folder, results.experiment, about(results), *says, runs_shown(results))
    by_game(results, folder, panels)


def draw_panels(places, results, panels, beside):
    """A panel of curves for each variant, with those of others that are drawn beside them."""
    for axes, (variant, title) in zip(places, panels.items(), strict=True):
        draw_curves(axes, results, variant, colours_of(results))
        own = len(axes.get_legend_handles_labels()[0])
        for other, (panel, label, look, _) in beside.items():
            if panel == variant:
                draw_curves(axes, results, other, colours_of(results), label=label, **look)
        if axes is not places[0] and len(axes.get_legend_handles_labels()[0]) > own:
            legend_in(axes, skip=own)
        axes.set(title=title, xlabel="environment steps")
    highest = places[0].get_ylim()[1]
    share_returns(*places)
    room = 0.2 if highest > 0.7 * places[0].get_ylim()[1] else 0.0
    legend_in(places[0], results.entry.axis, room=room, ncols=2, loc="upper left")


def draw_summary(places, results, lines, hollow):
    """Returns over the settings: at the end, and over the whole run."""
    for axes, when, title in zip(
        places, ("final", "mean"), ("at the end of training", "over the whole run"), strict=True
    ):
        draw_lines(axes, results, lines, settings_of(results), when, hollow)
        axes.set(title=title, xlabel=results.entry.axis)
    share_returns(*places)
    many = len(lines) > 3
    legend_in(places[0], **({"room": 0.45, "ncols": 2, "loc": "upper left"} if many else {}))


def by_game(results, folder, panels):
    """A figure for each variant, with a panel for each game (fig. 7-12, 14-17)."""
    for variant, title in panels.items() if len(results.games) > 1 else ():
        columns = min(4, len(results.games))
        figure, places = grid_of_panels(-(-len(results.games) // columns), columns, 1.5)
        for axes in places.flat[len(results.games) :]:
            axes.set_axis_off()
        for number, (axes, game) in enumerate(zip(places.flat, results.games, strict=False)):
            axes.tick_params(labelbottom=number + columns >= len(results.games))
            draw_curves(axes, results, variant, colours_of(results), column="return", game=game)
            axes.set_title(game)
        legend_in(places.flat[0], results.entry.axis, room=0.3, ncols=2)
        figure.supxlabel("environment steps")
        figure.supylabel("return")
        says = f"{title[0].upper() + title[1:]}: each game by itself."
        save(figure, folder, f"{results.experiment}_by_game_{variant}", says, runs_shown(results))


def gains(results, folder, groups):
    """Curves, and gains of one setting over another as bars; above them the curves of each game, if they are few."""
    (variant,) = results.entry.panels
    games = results.games if 1 < len(results.games) <= 4 else []
    letters, colours = string.ascii_lowercase[: len(games) + 2], colours_of(results)
    figure, places = rows_of_panels(*[letters[:-2]] * bool(games), letters[-2:], height=2.1)
    for letter, game in zip(letters, games, strict=False):
        draw_curves(places[letter], results, variant, colours, column="return", game=game)
        places[letter].set(title=f"({letter}) {game}", xlabel="environment steps", ylabel="return" * (letter == "a"))
    left, right = (places[letter] for letter in letters[-2:])
    draw_curves(left, results, variant, colours)
    title = "mean over games" if len(results.games) > 1 else "learning curves"
    left.set(title=f"({letters[-2]}) {title}", xlabel="environment steps", ylabel=label_of(results))
    legend_in(places["a"], room=0.25, loc="upper left")
    groups = {name: group for name, group in groups.items() if results.values(group[0][0])}
    looks = [colours[value] if x == variant else COLOURS[4] for (x, value), *_ in groups.values()]
    draw_bars(right, results, {name: group[:2] for name, group in groups.items()}, looks)
    by = ", by game" * (len(results.games) > 1)
    right.set(title=f"({letters[-1]}) gain from EWMA{by}", ylabel=label_of(results))
    says = [says for *_, says in groups.values()] + [f"({letters[-1]}): {about_bars(results)}"]
    save(figure, folder, results.experiment, about(results), *says, runs_shown(results))
    if not games:
        by_game(results, folder, results.entry.panels)


def difference(results, folder, variants):
    """Bars (fig. 3): the largest minus the smallest batch size."""
    sizes = results.settings(variants[0])
    groups = {results.entry.panels[x].replace(" adj", "\nadj"): ((x, sizes[0]), (x, sizes[-1])) for x in variants}
    figure, axes = plt.subplots(figsize=(WIDTH, 2.6), layout="constrained")
    draw_bars(axes, results, groups)
    axes.set_ylabel(f"{label_of(results)},\n{sizes[0]} minus {sizes[-1]} {results.entry.axis}")
    says = f"Difference between the largest and the smallest batch size (paper's fig. 3), {about_bars(results)}"
    save(figure, folder, f"{results.experiment}_difference", says, runs_shown(results, "mean"))


def advantage_std(results, folder, variant):
    """How much the estimates swing that advantages are divided by (fig. 13). No smoothing, which would hide it."""
    table = results.advantage_std(variant)
    if table.empty:
        return
    sizes = [size for size in settings_of(results) if size in set(table["value"])]
    games = [game for game in results.games if game in set(table["game"])]
    figure, places = grid_of_panels(len(games), len(sizes), 1.5, sharey=True)
    for (row, game), (column, size) in itertools.product(enumerate(games), enumerate(sizes)):
        axis = results.entry.axis.removesuffix("s" * (size == "1"))
        axes, curve = places[row, column], table[(table["game"] == game) & (table["value"] == size)]
        axes.plot(curve["step"], curve["std"], color=colours_of(results)[size], linewidth=0.8)
        axes.set(yscale="log", title=f"{size} {axis}" if row == 0 else "")
        axes.set_ylabel(game if column == 0 and len(games) > 1 else "")
        steps_axis(axes, results.runs[0].flags["total-timesteps"], ticks=3)
    figure.supxlabel("environment steps")
    figure.supylabel("standard deviation of advantages")
    says = "The estimates that advantages are divided by, if this is not adjusted to the batch size (paper's fig. 13), "
    shown = runs_shown(results, seeds=f"seed {table['seed'].iloc[0]}")
    save(figure, folder, f"{results.experiment}_advantage_std", f"{says}not smoothed.", shown)
    write_csv(table, folder / f"{results.experiment}_advantage_std.csv")


def grid(results, folder, labels):
    """Final returns over two flags, the numbers at the end of the variants' and of the values' names (fig. 18)."""
    rows = results.rows.assign(y=results.rows["variant"], x=results.rows["value"])
    rows[["y", "x"]] = rows[["y", "x"]].apply(lambda names: names.str.split("-").str[-1].astype(float))
    for game in results.games:
        cells = rows[rows["game"] == game].pivot_table(index="y", columns="x", values="final_return", dropna=False)
        figure, axes = plt.subplots(figsize=(4.4, 3.3), layout="constrained")
        image = axes.imshow(cells, origin="lower", cmap="cividis", aspect="auto")
        middle = (cells.min(axis=None) + cells.max(axis=None)) / 2
        digits = 1 if cells.max(axis=None) >= 10 else 2
        for (row, column), value in np.ndenumerate(cells):
            text = "" if np.isnan(value) else f"{value:.{digits}f}"
            axes.text(column, row, text, ha="center", va="center", color="black" if value > middle else "white")
        axes.set_xticks(range(cells.shape[1]), [f"{x:g}" for x in cells.columns])
        axes.set_yticks(range(cells.shape[0]), [f"{x:g}" for x in cells.index])
        axes.set(title=game.replace("_", " "), xlabel=labels[0], ylabel=labels[1])
        axes.grid(visible=False)
        figure.colorbar(image, label="final return")
        name = results.experiment if len(results.games) == 1 else f"{results.experiment}_{game}"
        save(figure, folder, name, about(results), runs_shown(results, "mean"))


FIGURES = {x.__name__: x for x in (curves, gains, difference, advantage_std, grid)}
