"""Learning curves of any runs, which no sweep made; if asked, before those that the authors have published."""

import glob
import itertools
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from lab.common import ROOT, fail, read_checkpoint
from lab.drawing import COLOURS, STYLE, WIDTH
from lab.logs import RETURN, read_scalars
from lab.reporting import table
from lab.runs import read_table, write_csv

AUTHORS = ROOT / "results/authors_hard.csv"  # PPO and PPG on each game, hard mode, all levels; it names the source
MANY = 6  # runs that a table does not list one by one
STEPS = {"1m": 1_000_000, "2m": 2_000_000, "4m": 4_000_000, "8m": 8_000_000, "final": 100_000_000}


def draw_any(pairs, out, tag=RETURN, with_authors=None):
    """Figure, numbers and table of LABEL=RUNS pairs; in the tables, another tag takes the place of the return."""
    if tag != RETURN and with_authors:
        fail("--reference authors: theirs are returns; leave out --tag")
    for pair in pairs:
        if "=" not in pair:
            fail(f"{pair}: must be LABEL=RUNS, the runs being a pattern of folders or a CSV file")
    labels = [pair.split("=")[0] for pair in pairs]
    if len(set(labels)) < len(labels):
        fail("a label is given twice; one pattern may match all its runs")
    curves = pd.concat([read_curves(*pair.split("=", 1), tag) for pair in pairs], ignore_index=True)
    measured = curves[curves["measured"]]
    reference = authors(game_of(measured["folder"].unique())) if with_authors else None
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        draw(curves, out, "return, last 100 episodes" if tag == RETURN else tag, reference)
        points = measured.astype({"step": int})[["label", "run", "step", "return"]]
        write_csv(points if tag == RETURN else points.rename(columns={"return": tag}), f"{out}.csv")
        digits = ".1f" if tag == RETURN else "#.2g"
        Path(f"{out}.md").write_text(table_of_returns(pd.concat([curves, reference]), digits))
        print(f"{out}.md")
    except OSError as error:
        fail(f"--out {out}: cannot be written ({error.strerror})")


def read_curves(label, pattern, tag):
    """A table with columns run, step and return: of the runs that match, or out of such a file."""
    columns = ["run", "step", "return"]
    column = "return" if tag == RETURN else tag
    if pattern.endswith(".csv"):
        try:
            table = read_table(pattern, ["run", "step", column]).rename(columns={column: "return"})
            return table[columns].assign(label=label, folder="", measured=False)
        except (OSError, ValueError) as error:
            fail(f"{label}={pattern}: cannot be read as a table of run, step and {column} ({error})")
    tables, folders = [], sorted(glob.glob(pattern))
    names = [Path(folder).name for folder in folders]
    for folder, name in zip(folders, names if len(set(names)) == len(names) else folders, strict=True):
        scalars, damaged = read_scalars(folder, [tag])
        for file in damaged:
            print(f"note: {Path(folder, file)}: is damaged; showing what can be read of it")
        curve = scalars[tag]
        if len(curve):
            kept = curve[np.unique(np.linspace(0, len(curve) - 1, 200).round().astype(int))]
            tables.append(pd.DataFrame(kept, columns=["step", "return"]).assign(run=name, folder=folder))
    if not tables:
        fail(f"{label}={pattern}: no run with {'a finished episode' if tag == RETURN else tag} is there")
    return pd.concat(tables).assign(label=label, measured=True)


def game_of(folders):
    """The game that these runs play, if the authors' runs are like them: one game, hard mode, all levels."""
    games = set()
    for folder in folders:
        args = read_checkpoint(folder)["args"]
        game, mode, levels = (args.get(name) for name in ("env_id", "distribution_mode", "num_levels"))
        if (mode, levels) != ("hard", 0):
            other = f"{game}, {mode} mode, {levels or 'all'} levels" if mode else f"{game}, not of Procgen"
            fail(f"--reference authors: theirs are in hard mode, on all levels; {folder} is on {other}")
        games.add(game)
    if len(games) != 1:
        found = f"these are of {', '.join(sorted(games))}" if games else "a table does not say which"
        fail(f"--reference authors: needs runs of one game; {found}")
    return games.pop()


def authors(game):
    """Their points, as a table like that of one's own."""
    row = pd.read_csv(AUTHORS, comment="#", index_col="game").loc[game]
    points = [
        {"label": f"authors' {name.upper()}", "run": "mean of 3", "step": step, "return": row[f"{name}_{column}"]}
        for name in ("ppo", "ppg")
        for column, step in STEPS.items()
    ]
    return pd.DataFrame(points).assign(game=game, measured=False)


def draw(curves, out, name, reference):
    """Mean and range over the runs of a label; what was not measured here, out of a file, as crosses."""
    with plt.rc_context(fname=STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
        for (label, group), colour in zip(curves.groupby("label", sort=False), itertools.cycle(COLOURS)):
            label = label.replace("$", r"\$")  # not mathematics
            if not group["measured"].all():
                axes.plot(group["step"], group["return"], "x", color="black", label=label, zorder=3)
                continue
            runs = group.pivot(index="step", columns="run", values="return").interpolate(limit_area="inside").dropna()
            number = runs.shape[1]
            axes.plot(runs.index, runs.mean(axis=1), color=colour, label=f"{label} ({number} run{'s' * (number != 1)})")
            axes.fill_between(runs.index, runs.min(axis=1), runs.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="environment steps", ylabel=name)
        axes.set_xlim(left=0)
        if reference is not None:
            draw_reference(axes, reference, curves["step"].min(), curves["step"].max())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend()
        figure.savefig(f"{out}.png")
        figure.savefig(f"{out}.svg", metadata={"Date": None})
        plt.close(figure)
    print(f"{out}.png, .svg")


def draw_reference(axes, reference, begin, end):
    """The authors' points, two at least, up to the first that one's own runs, which end here, have yet to reach.

    They are a factor of two apart, and the last is far away: hence the logarithm of the steps.
    """
    right = max(2e6, min(reference.loc[reference["step"] >= end, "step"], default=end))
    shown = reference[reference["step"] <= right]
    looks = [{"marker": "o", "color": "0.7"}, {"marker": "s", "color": "0.5", "mfc": "none"}]  # seen where they meet
    for (label, points), look in zip(shown.groupby("label", sort=False), looks, strict=True):
        look |= {"ms": 4.5, "ls": "--", "linewidth": 1, "label": f"{label} (mean of 3 runs)"}
        axes.plot(points["step"], points["return"], zorder=1, **look)
    axes.set(xscale="log", title=f"{reference['game'].iloc[0]}, hard mode, all levels")
    axes.set_xlim(min(max(begin, end / 16), 5e5), 1.08 * right)
    axes.xaxis.set_major_locator(FixedLocator(1e6 * 2.0 ** np.arange(-20, 20)))
    axes.xaxis.set_minor_locator(NullLocator())


def table_of_returns(curves, digits):
    """Return of every run at the steps of a file, or, without one, at quarters of the shortest run; and at its end.

    Of many runs, mean and standard deviation.
    """
    given = sorted(set(curves.loc[~curves["measured"], "step"]))
    end = curves[curves["measured"]].groupby(["label", "run"])["step"].max().min()
    steps, rows = given or [end * quarter // 4 for quarter in (1, 2, 3)], []
    for label, group in curves.groupby("label", sort=False):
        runs = [run for _, run in group.groupby("run")]
        cells = [[np.interp(step, run["step"], run["return"], right=np.nan) for run in runs] for step in steps]
        cells.append([run["return"].iloc[-1] for run in runs])
        rows.append([label, *(cell_of_returns(cell, digits) for cell in cells)])
    return table(["", *(f"{x:,.0f} steps" for x in steps), "at the end"], rows) + "\n"


def cell_of_returns(returns, digits):
    known = [x for x in returns if not np.isnan(x)]
    if len(known) > MANY:
        return f"{np.mean(known):{digits}} ± {np.std(known, ddof=1):{digits}}"
    return " / ".join(f"{x:{digits}}" for x in known)
