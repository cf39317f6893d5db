"""From the runs of a sweep to tables: a row for each run, and the points of its learning curve."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from lab.catalogue import EXPERIMENTS, GAMES, SCALES, SHARED, Run, return_range, runs_of, twins_of
from lab.common import fail
from lab.inference import second_half, swing
from lab.logs import ADVANTAGES, CLIPPED, RETURN, read_scalars
from lab.running import is_locked, read_end

KEY = ["game", "variant", "value", "seed"]
CURVE = ["step", "return", "normalised_return"]
ROW = ["scale", "script", "steps", "finished", "seconds", "final_return", "final_normalised_return", "mean_return"]
ROW += ["mean_normalised_return", "clip_fraction", "advantage_swing"]
WORDS = ["game", "variant", "value", "scale", "script"]  # columns that are not numbers


def key_of(run):
    return {name: getattr(run, name) for name in KEY}


def in_order(runs, experiment, scale):
    """Sorted by setting, as the catalogue lists them, then by game and seed."""
    settings = list(dict.fromkeys((run.variant, run.value) for run in runs_of(experiment, scale, GAMES[:1], [1])))
    runs = [run for run in runs if (run.variant, run.value) in settings]
    return sorted(runs, key=lambda run: (settings.index((run.variant, run.value)), run.game, run.seed))


def find_runs(runs_dir, experiment, scale=None):
    """The runs of an experiment at one scale, and lines about what is wrong or left out."""
    found, notes = [], []
    for path in Path(runs_dir, experiment).glob("*/sweep/*.json"):
        try:
            found.append(Run(**json.loads(path.read_text())))
        except (ValueError, TypeError):
            notes.append(f"{path}: is damaged, or none of ours; left out")
    scales = [x for x in SCALES if any(run.scale == x for run in found)]
    if scale is None and len(scales) > 1:
        notes.append(f"runs of mixed scale: {', '.join(scales)}; this is {scales[0]}, and --scale shows the others")
    scale = scale or next(iter(scales or SCALES))
    runs = in_order([run for run in found if run.scale == scale], experiment, scale)
    kinds = pd.Series([json.dumps([run.flags.get(x) for x in SHARED]) for run in runs], dtype=object)
    if kinds.nunique() > 1:
        kept = kinds.mode()[0]
        notes.append(f"{(kinds != kept).sum()} runs left out: their {', '.join(SHARED)} are not those of the others")
        runs = [run for run, kind in zip(runs, kinds, strict=True) if kind == kept]
    return runs, notes


def final_window(total):
    """Steps at the end that count as final: the paper's 4 million, in short runs a tenth."""
    return 4_000_000 if total >= 40_000_000 else total // 10


def read_run(run, runs_dir, notes):
    """A run's row and its points. The final return is NaN until the run is finished."""
    folder, end = run.folder(runs_dir), read_end(run.file(runs_dir, "exit"))
    low, high = return_range(run.game, run.flags.get("distribution-mode"))
    scalars, damaged = read_scalars(folder, [RETURN, CLIPPED, ADVANTAGES])
    if not is_locked(folder):  # the last record of a live run may be half written
        notes += [f"{folder / name}: is damaged; showing what can be read of it" for name in damaged]
    curve = scalars[RETURN]
    finished = end.get("code") == 0 and len(curve) > 0 and curve[-1, 0] >= run.steps
    final = curve[curve[:, 0] > run.steps - final_window(run.steps), 1].mean() if finished else np.nan
    mean = curve[:, 1].mean() if len(curve) else np.nan
    row = {
        "scale": run.scale,
        "script": run.script,
        "steps": int(curve[-1, 0]) if len(curve) else 0,
        "finished": finished,
        "seconds": end.get("seconds", 0),
        "final_return": final,
        "final_normalised_return": (final - low) / (high - low),
        "mean_return": mean,
        "mean_normalised_return": (mean - low) / (high - low),
        "clip_fraction": np.nan if run.flags.get("clip-coef") == 0 else second_half(scalars[CLIPPED][:, 1]),
        "advantage_swing": swing(scalars[ADVANTAGES][:, 1]),
    }
    if not len(curve):
        return row, []
    grid = np.linspace(0, run.flags["total-timesteps"], SCALES[run.scale].points + 1)[1:]
    grid = grid[(grid >= curve[0, 0]) & (grid <= curve[-1, 0])]
    returns = np.interp(grid, *curve.T)
    return row, zip(grid.round().astype(int), returns, (returns - low) / (high - low), strict=True)


class Results:
    """The runs of one experiment at one scale.

    all_rows: a row for each run, with its final return; all_points: a row for each point of its learning curve. In rows
    and points, runs that the catalogue lists once are under each of the variants that they serve.
    """

    def __init__(self, experiment, runs, rows, points, runs_dir=None, folders=()):
        self.experiment, self.entry, self.runs = experiment, EXPERIMENTS[experiment], runs
        self.runs_dir, self.folders, self.all_rows, self.all_points = runs_dir, folders, rows, points
        self.finished = int(rows["finished"].sum())
        # Of a setting, the median run stands for all: a run that was paused has counted the pause.
        seconds = rows[rows["finished"]].groupby(["variant", "value"])["seconds"]
        self.hours = float((seconds.median() * seconds.count()).sum()) / 3600
        self.games = [game for game in GAMES if game in set(rows["game"])]
        self.seeds = sorted(set(rows["seed"]))
        self.measure = "return" if len(self.games) == 1 else "normalised_return"  # of one game, as the game gives it
        self.rows, self.points = self.share(rows), self.share(self.usable(rows, points))

    @classmethod
    def of_runs(cls, experiment, runs, runs_dir, notes):
        """Read what the runs have written. Appends to notes what is wrong with their files."""
        rows, points = [], []
        for run in tqdm(runs, "reading runs", unit=" runs", delay=2, leave=False, disable=None):
            row, curve = read_run(run, runs_dir, notes)
            rows.append(key_of(run) | row)
            points += [key_of(run) | dict(zip(CURVE, point, strict=True)) for point in curve]
        return cls(experiment, runs, pd.DataFrame(rows), pd.DataFrame(points, columns=KEY + CURVE), runs_dir)

    @classmethod
    def of_csv(cls, experiment, *folders):
        """Read the tables that figures.py has written; of several machines, each run where it is furthest."""
        tables = [tables for folder in folders for tables in read_tables(experiment, Path(folder))]
        rows, points = (pd.concat(x.assign(origin=n) for n, x in enumerate(kind)) for kind in zip(*tables, strict=True))
        own = rows[~rows["lent"]]
        scales = (rows if own.empty else own)["scale"].unique()
        if len(scales) != 1 or scales[0] not in SCALES:
            raise ValueError(f"they must be of one scale, not of {', '.join(scales) or 'none'}")
        # What is lent, for games and seeds that the experiment has or is to have.
        wanted = [(run.game, run.seed) for run in runs_of(experiment, scales[0])]
        wanted += own[["game", "seed"]].itertuples(index=False, name=None)
        wanted = pd.MultiIndex.from_frame(rows[["game", "seed"]]).isin(wanted) & (rows["scale"] == scales[0])
        rows = rows[~rows["lent"] | wanted]
        scale, games, seeds = rows["scale"].iloc[0], set(rows["game"]), set(rows["seed"])
        rows = rows.sort_values(["finished", "steps"], kind="stable").drop_duplicates(KEY, keep="last")
        points = points.merge(rows[[*KEY, "origin"]])
        there = rows[KEY].to_dict("records")
        runs = in_order(runs_of(experiment, scale, games, seeds), experiment, scale)
        runs = [run for run in runs if key_of(run) in there]
        if len(runs) < len(rows):
            raise ValueError("they have runs that are none of this experiment's")
        keys = pd.DataFrame(map(key_of, runs))
        rows, points = (keys.merge(table).drop(columns=["origin", "lent"]) for table in (rows, points))
        return cls(experiment, runs, rows, points, folders=folders)

    def usable(self, rows, points):
        """The curves to show: of finished runs, but where a setting has none on a game, of those on their way."""
        setting = ["game", "variant", "value"]
        any_finished = rows.groupby(setting)["finished"].transform("any")
        return points.merge(rows.loc[rows["finished"] | ~any_finished, [*setting, "seed"]])

    def share(self, table):
        """Put the runs of a variant's first setting under the variants that they serve, too."""
        copies = []
        for source, others in self.entry.shared.items():
            runs = table[(table["variant"] == source) & (table["value"] == self.settings(source)[0])]
            copies += [runs.assign(variant=other) for other in others if self.settings(other)]
        return pd.concat([*copies, table], ignore_index=True)

    def values(self, variant):
        """A variant's settings that have runs, in the catalogue's order."""
        return list(dict.fromkeys(self.rows.loc[self.rows["variant"] == variant, "value"]))

    def settings(self, variant):
        """The same, also those without a run here."""
        runs = runs_of(self.experiment, self.runs[0].scale, self.games[:1], self.seeds[:1])
        return [run.value for run in runs if run.variant == variant]

    def of_this_scale(self, what):
        """Of a list of variants, those that the scale has."""
        return list(filter(self.settings, what)) if isinstance(what, list) else what

    def final(self, variant, value, column="final_normalised_return"):
        """Final normalised returns, or another number, of the finished runs of a setting, by game and seed."""
        rows = self.rows[(self.rows["variant"] == variant) & (self.rows["value"] == value)]
        return rows.dropna(subset="final_return").set_index(["game", "seed"])[column].sort_index()

    def over_seeds(self, variant, value, column="final_normalised_return"):
        """For each seed the mean over games; seeds that lack a game are left out."""
        by_game = self.final(variant, value, column).unstack("game").reindex(columns=self.games)
        return by_game.dropna().mean(axis=1).to_numpy()

    def advantage_std(self, variant):
        """What advantages were divided by, in a variant and in the setting that it shares: of the first seed."""
        columns = ["game", "value", "seed", "step", "std"]
        files = [Path(folder, f"{self.experiment}_advantage_std.csv") for folder in self.folders]
        tables = [read_table(path, columns) for path in files if path.exists()]
        for run in reversed(self.runs) if self.runs_dir else ():
            shared = variant in self.entry.shared.get(run.variant, []) and run.value == self.settings(run.variant)[0]
            if (run.variant == variant or shared) and run.seed == self.seeds[0]:
                curve = read_scalars(run.folder(self.runs_dir), [ADVANTAGES])[0][ADVANTAGES]
                curve = pd.DataFrame(curve[:: len(curve) // 1000 + 1], columns=["step", "std"]).astype({"step": int})
                tables.append(curve.assign(game=run.game, value=run.value, seed=run.seed)[columns])
        if not tables:
            return pd.DataFrame(columns=columns)
        table = pd.concat(tables, ignore_index=True)[columns]
        return table[table["seed"] == table["seed"].min()].drop_duplicates(["game", "value", "step"])


def results_of_csv(experiment, folders):
    """For --csv: the tables in these folders, or one line about what is wrong with them."""
    try:
        return Results.of_csv(experiment, *folders)
    except (OSError, ValueError) as error:
        fail(f"--csv {' '.join(folders)}: has no tables of {experiment} that figures.py has written ({error})")


def read_tables(experiment, folder):
    """Pairs of rows and points: the experiment's own, and the runs of others that serve it, too (Run.twin)."""

    def read(name):
        return read_table(folder / f"{name}_runs.csv", KEY + ROW), read_table(folder / f"{name}.csv", KEY + CURVE)

    lenders = {twin[0] for scale in SCALES for twin in twins_of(experiment, scale).values()}
    lenders = [name for name in lenders if (folder / f"{name}_runs.csv").exists()]
    if (folder / f"{experiment}_runs.csv").exists() or not lenders:
        yield [table.assign(lent=False) for table in read(experiment)]
    for name in lenders:
        rows, points = read(name)
        for (variant, value), twin in twins_of(experiment, rows["scale"].iloc[0]).items():
            lent = [x[(x["variant"] == twin[1]) & (x["value"] == twin[2])] for x in (rows, points)]
            if twin[0] == name:
                yield [x.assign(variant=variant, value=value, lent=True) for x in lent]


def read_table(path, columns):
    """A table, with these columns at least and numbers where there should be."""
    table = pd.read_csv(path, dtype={"value": str}, float_precision="round_trip", comment="#")
    if missing := [name for name in columns if name not in table]:
        raise ValueError(f"{path} has no column {missing[0]}")
    for name in columns:
        if name not in WORDS and not pd.api.types.is_numeric_dtype(table[name]):  # true and false count as numbers
            raise ValueError(f"{path}: column {name} has something that is not a number")
    return table


def write_csv(table, path, digits=6):
    table.to_csv(path, index=False, float_format=f"%.{digits}g")
    print(path)
